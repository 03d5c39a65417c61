"""A fake of Telegram with the methods of the Bot API that the bot calls.

Shapes and texts follow https://core.telegram.org/bots/api; `test_bot_api.py` has python-telegram-bot, a client that was
written for the real one, talk to it. Every valid token is a separate bot, so tests do not disturb each other.
"""

from __future__ import annotations

import json
import re
from collections import deque
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any
from urllib.parse import parse_qsl

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

TOKEN = re.compile(r"[0-9]+:[A-Za-z0-9_-]+")
SECRET = re.compile(r"[A-Za-z0-9_-]{1,256}")
DATE = 1_700_000_000


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

    id: int
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
        self.app.add_api_route("/bot{token}/{method}", self.answer, methods=["GET", "POST"])

    def bot(self, token: str) -> Bot:
        return self.bots.setdefault(token, Bot(int(token.partition(":")[0])))

    async def answer(self, token: str, method: str, request: Request) -> JSONResponse:
        if not TOKEN.fullmatch(token):
            return refusal(401, "Unauthorized")
        bot = self.bot(token)
        arguments = await read_arguments(request)
        bot.calls.append((method, arguments))
        if (failures := bot.failures.get(method)) and (failure := failures.popleft()) is not None:
            return failure
        known = METHODS.get(method)
        if known is None:
            return refusal(404, "Not Found")
        try:
            return JSONResponse({"ok": True, **known(bot, arguments)})
        except BadRequest as error:
            return refusal(400, f"Bad Request: {error}")


def refusal(code: int, description: str, **parameters: int) -> JSONResponse:
    body: dict[str, Any] = {"ok": False, "error_code": code, "description": description}
    return JSONResponse(body | ({"parameters": parameters} if parameters else {}), code)


async def read_arguments(request: Request) -> dict[str, Any]:
    """Return a call's arguments: JSON, or a form or query whose values may be JSON themselves."""
    body = await request.body()
    if request.headers.get("content-type", "").startswith("application/json"):
        return dict(json.loads(body))
    return dict(parse_qsl(body.decode() or request.url.query, keep_blank_values=True))


def get_me(bot: Bot, arguments: dict[str, Any]) -> dict[str, Any]:
    me = {"id": bot.id, "is_bot": True, "first_name": "Headgate", "username": "headgate_bot"}
    flags = ("can_join_groups", "can_read_all_group_messages", "supports_inline_queries")
    return {"result": me | dict.fromkeys(flags, False)}


def send_message(bot: Bot, arguments: dict[str, Any]) -> dict[str, Any]:
    text = str(arguments.get("text", ""))
    if arguments.get("parse_mode") == "HTML":
        text = plain_text(text)
    if not text.strip():
        raise BadRequest("message text is empty")
    if len(text) > 4096:
        raise BadRequest("message is too long")
    chat_id = arguments.get("chat_id")
    if not re.fullmatch(r"-?[0-9]+", str(chat_id)):
        raise BadRequest("chat not found")
    kind = "private" if int(str(chat_id)) > 0 else "supergroup"
    chat = {"id": int(str(chat_id)), "type": kind} | ({"title": "Group"} if kind == "supergroup" else {})
    message = {"message_id": len(bot.calls), "date": DATE, "chat": chat, "text": text}
    if "message_thread_id" in arguments:
        topic = {"message_thread_id": int(arguments["message_thread_id"]), "is_topic_message": True}
        message |= topic
    return {"result": message | {"from": get_me(bot, {})["result"]}}


def answer_callback_query(bot: Bot, arguments: dict[str, Any]) -> dict[str, Any]:
    if not arguments.get("callback_query_id"):
        raise BadRequest("query is too old and response timeout expired or query ID is invalid")
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
    allowed = arguments.get("allowed_updates", [])
    bot.webhook = arguments | {
        "allowed_updates": json.loads(allowed) if isinstance(allowed, str) else allowed
    }
    return {"result": True, "description": "Webhook was set"}


def get_webhook_info(bot: Bot, arguments: dict[str, Any]) -> dict[str, Any]:
    shown = {name: bot.webhook[name] for name in ("allowed_updates",) if bot.webhook.get(name)}
    info = {"url": bot.webhook.get("url", ""), "has_custom_certificate": False, "pending_update_count": 0}
    return {"result": info | shown}


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
    "getMe": get_me,
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
