"""Client for the methods of Telegram's Bot API that the bot uses: https://core.telegram.org/bots/api"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import httpx

from headgate import HeadgateError
from headgate.clock import Clock, SteadyClock
from headgate.observe import RedactingFilter
from headgate_services.telegram.markdown import to_html

UPDATES = ["message", "callback_query"]
"""The kinds of updates that the bot processes."""

CALL_SECONDS = 10.0
"""Time limit for one call."""
POLL_SECONDS = 50
"""The longest wait for updates."""
RETRIES = 3
"""Attempts after the first one, if Telegram answers 429."""
LONGEST_WAIT = 60
"""Total seconds to wait before these attempts."""
MOST_DELAYED = 100
"""The most replies that wait for another attempt."""

_logger = logging.getLogger(__name__)

LONGEST_TEXT = 4096
"""The most characters of one message."""


class BotApiError(HeadgateError):
    """Telegram refused a call, or could not be reached.

    Attributes:
        code: The error code; `None` without a readable response.
        retry_after: Seconds to wait before another attempt; `None` if Telegram gave none.
    """

    def __init__(
        self, method: str, problem: str, code: int | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(f"{method}: {problem}")
        self.code = code
        self.retry_after = retry_after


class BotApi:
    """The Bot API for one bot.

    Args:
        token: The bot's token. It is part of every URL, so it is removed from httpx's log.
        api_base: The base URL of the Bot API.
        clock: The clock for pauses after a 429.
    """

    def __init__(
        self,
        token: str,
        *,
        api_base: str = "https://api.telegram.org",
        clock: Clock | None = None,
    ) -> None:
        self._url = f"{api_base.rstrip('/')}/bot{token}"
        self._clock = SteadyClock() if clock is None else clock
        self._client = httpx.AsyncClient()
        self._delayed: set[asyncio.Task[None]] = set()
        self._secrecy = RedactingFilter([token])
        logging.getLogger("httpx").addFilter(self._secrecy)

    async def send_message(self, chat_id: str, text: str, message_thread_id: int | None = None) -> None:
        """Send Markdown to a chat, or to a topic of it; long text is split into several messages.

        Text that Telegram cannot parse as HTML is sent again as plain text. After a 429, the rest is sent in the
        background.

        Raises:
            BotApiError: Telegram refuses for another reason, or cannot be reached.
        """
        chat: dict[str, Any] = {"chat_id": chat_id}
        if message_thread_id is not None:
            chat["message_thread_id"] = message_thread_id
        parts = deque(_parts(text))

        async def send_rest() -> None:
            while parts:
                await self._send_part(chat, parts[0])
                parts.popleft()

        await self._send_now_or_later(send_rest)

    async def _send_part(self, chat: Mapping[str, Any], text: str) -> None:
        try:
            await self._call("sendMessage", {**chat, "text": to_html(text), "parse_mode": "HTML"})
        except BotApiError as error:
            if error.code != httpx.codes.BAD_REQUEST or "parse" not in str(error):
                raise
            await self._call("sendMessage", {**chat, "text": text})

    async def answer_callback_query(self, query_id: str, text: str | None = None) -> None:
        """Confirm a button press; after a 429, in the background."""
        arguments = {"callback_query_id": query_id, "text": (text or "")[:200]}

        async def answer() -> None:
            await self._call("answerCallbackQuery", arguments)

        await self._send_now_or_later(answer)

    async def set_webhook(self, url: str, secret: str) -> str:
        """Set the URL and the secret of the webhook, and return Telegram's description of the result."""
        document = await self._call(
            "setWebhook",
            {"url": url, "secret_token": secret, "allowed_updates": UPDATES},
        )
        return str(document.get("description", "the webhook is set"))

    async def webhook_info(self) -> dict[str, Any]:
        """Return the state of the webhook."""
        info: dict[str, Any] = (await self._call("getWebhookInfo", {}))["result"]
        return info

    async def delete_webhook(self) -> str:
        """Remove the webhook, and return Telegram's description of the result. Pending updates are kept."""
        return str((await self._call("deleteWebhook", {})).get("description", "the webhook is deleted"))

    async def get_updates(self, offset: int | None) -> list[dict[str, Any]]:
        """Return the updates from `offset` on; wait up to `POLL_SECONDS` for the first one."""
        arguments = {"timeout": POLL_SECONDS, "allowed_updates": UPDATES} | (
            {} if offset is None else {"offset": offset}
        )
        document = await self._call("getUpdates", arguments, timeout=CALL_SECONDS + POLL_SECONDS)
        return list(document["result"])

    async def _send_now_or_later(self, send: Callable[[], Awaitable[None]]) -> None:
        """Make the first attempt; after a 429, retry in a task, so that the webhook can answer."""
        try:
            await send()
        except BotApiError as error:
            if (
                error.retry_after is None
                or error.retry_after > LONGEST_WAIT
                or len(self._delayed) >= MOST_DELAYED
            ):
                raise
            task = asyncio.create_task(self._send_later(send, error))
            self._delayed.add(task)
            task.add_done_callback(self._delayed.discard)

    async def _send_later(self, send: Callable[[], Awaitable[None]], error: BotApiError) -> None:
        """Repeat a failed attempt after the waits that Telegram asks for, within our limits."""
        waited = 0
        for _ in range(RETRIES):
            if error.retry_after is None or waited + error.retry_after > LONGEST_WAIT:
                break
            waited += error.retry_after
            _logger.info("%s; trying again in %d s", error, error.retry_after)
            await self._clock.asleep(error.retry_after)
            try:
                await send()
            except BotApiError as again:
                error = again
            else:
                return
        _logger.error("a delayed reply was not sent: %s", error)

    async def _call(
        self, method: str, arguments: Mapping[str, Any], timeout: float = CALL_SECONDS
    ) -> dict[str, Any]:
        """Call a method, and return the whole response.

        Raises:
            BotApiError: Telegram refuses, cannot be reached, or does not answer with JSON.
        """
        try:
            response = await self._client.post(f"{self._url}/{method}", json=dict(arguments), timeout=timeout)
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
            parameters = document.get("parameters")
            wait = parameters.get("retry_after") if isinstance(parameters, dict) else None
            problem = f"{code} {document.get('description', '')}".strip()
            raise BotApiError(method, problem, code, wait if isinstance(wait, int) and wait >= 0 else None)
        return document

    async def aclose(self) -> None:
        """Close the connections; delayed replies are dropped."""
        if self._delayed:
            _logger.warning("%d delayed replies are not sent, because the bot stops", len(self._delayed))
        for task in self._delayed:
            task.cancel()
        await asyncio.gather(*self._delayed, return_exceptions=True)
        logging.getLogger("httpx").removeFilter(self._secrecy)
        await self._client.aclose()


def _parts(text: str) -> Iterator[str]:
    """Split a text into pieces of at most `LONGEST_TEXT` characters, at line ends if possible."""
    while len(text) > LONGEST_TEXT:
        cut = text.rfind("\n", 1, LONGEST_TEXT) + 1 or LONGEST_TEXT
        yield text[:cut]
        text = text[cut:]
    yield text
