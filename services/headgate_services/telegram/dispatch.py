"""Where admitted messages go: to an HTTP endpoint, to a Python function, or back to the sender.

A handler gets a `Message` or a `ButtonPress` and returns the text to answer with, or `None` for no answer. It has done
its work when it returns; when it raises, the message counts as not dispatched, its unit is given back, and Telegram
delivers it again.
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
        file_id: What it is fetched by.
        name: Its name; `None` for a picture.
        media_type: As its sender says; `None` for a picture.
    """

    kind: str
    file_id: str
    name: str | None = None
    media_type: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a user.

    Attributes:
        update_id: Telegram's number for the update; the same one if it is delivered again.
        message_id: The message's number in its chat.
        user_id: Who wrote it.
        chat_id: Where.
        text: The text, or the caption of a picture or document.
        message_thread_id: The topic of a forum; `None` outside of one.
        files: The pictures and documents that came with it; `getFile` of the Bot API finds one by its id.
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
        update_id: As in `Message`.
        query_id: Telegram's id of the press.
        user_id: Who pressed.
        data: What the button carries; `None` if nothing.
        chat_id: Where the message with the button stands; `None` if it is not known.
        message_thread_id: The topic of a forum; `None` outside of one.
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
    """Answer with the same text."""
    return event.text if isinstance(event, Message) else event.data


class DispatchError(HeadgateError):
    """A handler could not be reached, or refused."""


class HttpAgent:
    """Hands events to an HTTP endpoint, as JSON by POST.

    Any status from 200 to 299 means that it has taken the event; if the body is a JSON object with a text `reply`, that
    is the answer. A status of 500 and above, and no answer at all, are tried again, so an event may arrive twice: its
    `Idempotency-Key` is then the same.

    Args:
        url: The endpoint.
        timeout: Seconds for one attempt.
        clock: What to pause with.
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
    """A problem that may be gone at the next attempt."""


def _reply(response: httpx.Response) -> str | None:
    """Return the answer that a body carries; not every agent sends one, or JSON at all."""
    try:
        document = response.json()
    except ValueError:
        return None
    reply = document.get("reply") if isinstance(document, dict) else None
    return reply if isinstance(reply, str) and reply else None


def load_handler(spec: str) -> Handler:
    """Return the function that `package.module:function` names; one that is not a coroutine function gets a thread.

    Raises:
        ConfigError: There is no such function.
    """
    module_name, _, name = spec.partition(":")
    if str(Path.cwd()) not in sys.path:  # as for `python -m`; an installed command does not have it
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
