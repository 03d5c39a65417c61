"""Handlers of admitted messages: an HTTP endpoint, a Python function, or an echo.

A handler gets a `Message` or a `ButtonPress` and returns the reply, or `None` for no reply. If it raises, the message was
not dispatched: its unit is given back, and Telegram delivers it again.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import httpx

from headgate import ConfigError, HeadgateError
from headgate.clock import Clock, WallClock

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class File:
    """A picture or document at Telegram.

    Attributes:
        kind: `photo` or `document`.
        file_id: The id for `getFile` of the Bot API.
        name: The file name; `None` for a picture.
        media_type: The media type that the sender declared; `None` for a picture.
    """

    kind: str
    file_id: str
    name: str | None = None
    media_type: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a user.

    Attributes:
        update_id: Telegram's id of the update; the same if it is delivered again.
        message_id: The id of the message in its chat.
        user_id: The id of the sender.
        chat_id: The id of the chat.
        text: The text, or the caption of a picture or document.
        message_thread_id: The topic of a forum; `None` outside of a forum.
        files: The pictures and documents of the message.
    """

    kind: ClassVar[str] = "message"
    update_id: int
    message_id: int
    user_id: str
    chat_id: str
    text: str
    message_thread_id: int | None = None
    files: tuple[File, ...] = ()


@dataclass(frozen=True, slots=True)
class ButtonPress:
    """A button that a user pressed.

    Attributes:
        update_id: Telegram's id of the update; the same if it is delivered again.
        query_id: Telegram's id of the press.
        user_id: The id of the user.
        data: The data of the button, or None.
        chat_id: The chat of the message with the button; `None` if unknown.
        message_thread_id: The topic of a forum; `None` outside of a forum.
    """

    kind: ClassVar[str] = "button"
    update_id: int
    query_id: str
    user_id: str
    data: str | None = None
    chat_id: str | None = None
    message_thread_id: int | None = None


Handler = Callable[[Message | ButtonPress], Awaitable[str | None]]


async def echo(event: Message | ButtonPress) -> str | None:
    """Reply with the same text."""
    return event.text if isinstance(event, Message) else event.data


class DispatchError(HeadgateError):
    """A handler could not be reached, or refused."""


class HttpAgent:
    """Sends events to an HTTP endpoint, as JSON by POST.

    Any status from 200 to 299 means success; if the body is a JSON object with a text `reply`, that is the reply. After a
    status of 500 and above, or without a response, the request is repeated with the same `Idempotency-Key`.

    Args:
        url: The URL of the endpoint.
        timeout: Time limit for one attempt, in seconds.
        clock: The clock for pauses.
    """

    PAUSES = (0.5, 1.0, 2.0)

    def __init__(self, url: str, *, timeout: float = 30.0, clock: Clock | None = None) -> None:
        self._url = url
        self._clock: Clock = WallClock() if clock is None else clock
        self._client = httpx.AsyncClient(timeout=timeout)

    async def __call__(self, event: Message | ButtonPress) -> str | None:
        body = {"kind": event.kind, **asdict(event)}
        headers = {"Idempotency-Key": f"telegram-update-{event.update_id}"}
        for pause in self.PAUSES:
            try:
                return await self._send(body, headers)
            except _Passing as problem:
                _logger.warning("the agent: %s; trying again in %g s", problem, pause)
            await self._clock.asleep(pause)
        return await self._send(body, headers)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _send(self, body: dict[str, Any], headers: dict[str, str]) -> str | None:
        try:
            response = await self._client.post(self._url, json=body, headers=headers)
        except httpx.TransportError as error:
            raise _Passing(f"no answer ({type(error).__name__})") from error
        if response.is_server_error:
            raise _Passing(f"status {response.status_code}")
        if not response.is_success:
            raise DispatchError(f"the agent refused with status {response.status_code}")
        return _reply(response)


class _Passing(DispatchError):
    """A problem that may not occur at the next attempt."""


def _reply(response: httpx.Response) -> str | None:
    """Return the reply of a response, or None."""
    try:
        document = response.json()
    except ValueError:
        return None
    reply = document.get("reply") if isinstance(document, dict) else None
    return reply if isinstance(reply, str) and reply else None


def load_handler(spec: str) -> Handler:
    """Import the function `package.module:function`; a plain function is run in a thread.

    Raises:
        ConfigError: The function does not exist.
    """
    module_name, _, name = spec.partition(":")
    if str(Path.cwd()) not in sys.path:  # `python -m` adds it, an installed command does not
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"AGENT_HANDLER={spec!r}: {error}; write 'package.module:function'") from error
    if not callable(function):
        raise ConfigError(f"AGENT_HANDLER={spec!r} is not a function")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return cast(Handler, function)

    async def in_thread(event: Message | ButtonPress) -> str | None:
        return cast("str | None", await asyncio.to_thread(function, event))

    return in_thread
