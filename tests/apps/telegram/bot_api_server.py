"""A fake of Telegram with the methods of the Bot API that the bot calls.

Errors and limits follow https://core.telegram.org/bots/api. Every token is a separate bot, so tests do not disturb each
other.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

SECRET = re.compile(r"[A-Za-z0-9_-]{1,256}")


class BadRequest(Exception):
    """A call that Telegram refuses with 400."""


@dataclass
class Bot:
    """The state of one bot.

    Attributes:
        calls: Method and arguments of every call, in order.
        failures: Answers to give first, by method; `None` for the usual one.
        webhook: The arguments of setWebhook.
        updates: Pending updates.
    """

    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    failures: dict[str, deque[JSONResponse | None]] = field(default_factory=dict)
    webhook: dict[str, Any] = field(default_factory=dict)
    updates: list[dict[str, Any]] = field(default_factory=list)

    def fail(self, method: str, code: int, description: str, **parameters: int) -> None:
        """Refuse the next call of a method."""
        self.failures.setdefault(method, deque()).append(refusal(code, description, **parameters))

    def sent(self) -> list[dict[str, Any]]:
        """Return the arguments of the messages that were sent, refused ones included."""
        return [arguments for method, arguments in self.calls if method == "sendMessage"]


class BotApiServer:
    """All bots there are."""

    def __init__(self) -> None:
        self.bots: dict[str, Bot] = {}
        self.app = FastAPI()
        self.app.add_api_route("/bot{token}/{method}", self.answer, methods=["POST"])

    def bot(self, token: str) -> Bot:
        return self.bots.setdefault(token, Bot())

    async def answer(self, token: str, method: str, request: Request) -> JSONResponse:
        bot = self.bot(token)
        arguments = await request.json()
        bot.calls.append((method, arguments))
        if (failures := bot.failures.get(method)) and (failure := failures.popleft()) is not None:
            return failure
        try:
            return JSONResponse({"ok": True, **METHODS[method](bot, arguments)})
        except BadRequest as error:
            return refusal(400, f"Bad Request: {error}")


def refusal(code: int, description: str, **parameters: int) -> JSONResponse:
    body: dict[str, Any] = {"ok": False, "error_code": code, "description": description}
    return JSONResponse(body | ({"parameters": parameters} if parameters else {}), code)


def send_message(bot: Bot, arguments: dict[str, Any]) -> dict[str, Any]:
    text = str(arguments.get("text", ""))
    if arguments.get("parse_mode") == "HTML":
        text = plain_text(text)
    if not text.strip():
        raise BadRequest("message text is empty")
    if len(text) > 4096:
        raise BadRequest("message is too long")
    return {"result": {"message_id": len(bot.calls)}}


def answer_callback_query(bot: Bot, arguments: dict[str, Any]) -> dict[str, Any]:
    if len(str(arguments.get("text", ""))) > 200:
        raise BadRequest("MESSAGE_TOO_LONG")
    return {"result": True}


def set_webhook(bot: Bot, arguments: dict[str, Any]) -> dict[str, Any]:
    url = str(arguments.get("url", ""))
    if url and not url.startswith("https://"):
        raise BadRequest("bad webhook: An HTTPS URL must be provided for webhook")
    secret = arguments.get("secret_token")
    if secret is not None and not SECRET.fullmatch(str(secret)):
        raise BadRequest("secret token contains unallowed characters")
    bot.webhook = arguments
    return {"result": True, "description": "Webhook was set"}


def get_webhook_info(bot: Bot, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"result": {"url": bot.webhook.get("url", ""), "pending_update_count": 0}}


def delete_webhook(bot: Bot, arguments: dict[str, Any]) -> dict[str, Any]:
    bot.webhook = {}
    return {"result": True, "description": "Webhook was deleted"}


def get_updates(bot: Bot, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return pending updates at once; an offset confirms everything before it."""
    bot.updates = [update for update in bot.updates if update["update_id"] >= int(arguments.get("offset", 0))]
    return {"result": bot.updates}


METHODS = {
    "answerCallbackQuery": answer_callback_query,
    "deleteWebhook": delete_webhook,
    "getUpdates": get_updates,
    "getWebhookInfo": get_webhook_info,
    "sendMessage": send_message,
    "setWebhook": set_webhook,
}


class TelegramHtml(HTMLParser):
    """Reads the handful of tags that Telegram knows, and nothing that does not nest."""

    TAGS = frozenset({"b", "i", "u", "s", "a", "code", "pre", "blockquote"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.TAGS:
            raise BadRequest(f'can\'t parse entities: Unsupported start tag "{tag}" at byte offset 0')
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            raise BadRequest(f'can\'t parse entities: Unmatched end tag at byte offset 0, found "</{tag}>"')

    def handle_data(self, data: str) -> None:
        self.text += data


def plain_text(html: str) -> str:
    """Return the visible text of Telegram's HTML."""
    parser = TelegramHtml()
    parser.feed(html)
    parser.close()
    if parser.open:
        raise BadRequest(
            f"can't parse entities: Can't find end tag corresponding to start tag {parser.open[-1]}"
        )
    return parser.text
