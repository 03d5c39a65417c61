"""The few methods of Telegram's Bot API that the bot calls: https://core.telegram.org/bots/api"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from headgate.apps.telegram.markdown import to_html
from headgate.errors import HeadgateError

LONGEST_TEXT = 4096
"""Characters that Telegram takes in one message."""


class BotApiError(HeadgateError):
    """Telegram refused a call, or could not be reached.

    Attributes:
        code: The error code; `None` if there was no answer that could be read.
    """

    def __init__(self, method: str, problem: str, code: int | None = None) -> None:
        super().__init__(f"{method}: {problem}")
        self.code = code


class BotApi:
    """Telegram, as one bot.

    Args:
        token: The bot's token. It is part of every address, so it is kept out of httpx's log.
        api_base: Where the Bot API is.
        timeout: Seconds for one call.
    """

    def __init__(
        self, token: str, *, api_base: str = "https://api.telegram.org", timeout: float = 10.0
    ) -> None:
        self._url = f"{api_base.rstrip('/')}/bot{token}"
        self._client = httpx.AsyncClient(timeout=timeout)
        self._secrecy = _Without(token)
        logging.getLogger("httpx").addFilter(self._secrecy)

    async def send_message(self, chat_id: str, text: str, message_thread_id: int | None = None) -> None:
        """Send Markdown to a chat, or to a topic of it, in as many messages as it needs.

        What Telegram cannot read as HTML is sent once more as plain text.

        Raises:
            BotApiError: Telegram refuses it for another reason, or cannot be reached.
        """
        for part in _parts(text):
            message: dict[str, Any] = {"chat_id": chat_id, "text": part}
            if message_thread_id is not None:
                message["message_thread_id"] = message_thread_id
            try:
                await self.call("sendMessage", message | {"text": to_html(part), "parse_mode": "HTML"})
            except BotApiError as error:
                if error.code != httpx.codes.BAD_REQUEST or "parse" not in str(error):
                    raise
                await self.call("sendMessage", message)

    async def answer_callback_query(self, query_id: str, text: str | None = None) -> None:
        """Tell the client of somebody who pressed a button that it was noticed."""
        await self.call("answerCallbackQuery", {"callback_query_id": query_id, "text": (text or "")[:200]})

    async def set_webhook(self, url: str, secret: str) -> str:
        """Have updates delivered to a URL, with the secret in a header; return what Telegram says to it."""
        document = await self.call(
            "setWebhook",
            {"url": url, "secret_token": secret, "allowed_updates": ["message", "callback_query"]},
        )
        return str(document.get("description", "the webhook is set"))

    async def call(self, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Call a method; return the whole answer.

        Raises:
            BotApiError: Telegram refuses, cannot be reached, or answers with something else than its own JSON.
        """
        try:
            response = await self._client.post(f"{self._url}/{method}", json=dict(arguments))
        except httpx.HTTPError as error:
            raise BotApiError(method, f"no answer ({type(error).__name__})") from error
        try:
            document = response.json()
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise BotApiError(
                method, f"status {response.status_code} without a JSON object", response.status_code
            )
        if document.get("ok") is not True:
            code = document.get("error_code", response.status_code)
            raise BotApiError(method, f"{code} {document.get('description', '')}".strip(), code)
        return document

    async def aclose(self) -> None:
        """Close the connections."""
        logging.getLogger("httpx").removeFilter(self._secrecy)
        await self._client.aclose()


class _Without(logging.Filter):
    """Takes a secret out of what is logged."""

    def __init__(self, secret: str) -> None:
        super().__init__()
        self._secret = secret

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if self._secret in message:
            record.msg, record.args = message.replace(self._secret, "<token>"), None
        return True


def _parts(text: str) -> Iterator[str]:
    """Yield a text in pieces that Telegram takes, cut at line ends where there are any."""
    while len(text) > LONGEST_TEXT:
        cut = text.rfind("\n", 1, LONGEST_TEXT) + 1 or LONGEST_TEXT
        yield text[:cut]
        text = text[cut:]
    yield text
