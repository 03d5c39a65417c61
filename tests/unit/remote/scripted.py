"""A fake server with scripted replies, for tests of the engine of remote stores."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from headgate._concurrency import Event
from headgate.errors import StoreError, StoreTimeout, StoreUnavailable
from headgate.stores.remote.batching import RemoteCall
from headgate.stores.remote.peer import PENDING, Conversation, Receiver

PATIENCE = 60.0
"""Seconds after which a test fails that waits for something that never happens."""


class ScriptedTime:
    """A fake clock that replaces the module `time` in an engine; it moves only when a test advances it.

    A busy machine therefore causes no timeouts. Engines wait for the time that they computed, and check again.
    """

    def __init__(self) -> None:
        self._now = 1000.0

    def monotonic(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the time forward."""
        self._now += seconds


class ScriptedPeer:
    """Answers each request with the request itself, while it is open.

    Attributes:
        batches: The batches sent, in order.
        wires: The connections that were made, in order.
        answer: Makes the reply to the requests of a batch, as a list; an exception breaks the connection.
        before_connect: Called before each connection; may wait, or raise.
        is_open: Whether replies are delivered; otherwise they are kept back.
    """

    name = "scripted"
    failures = ()
    most_bytes: int | None = None

    def __init__(self, *, follows: bool = False) -> None:
        self.follows = follows
        self.batches: list[list[Any]] = []
        self.wires: list[ScriptedWire] = []
        self.answer: Callable[[list[Any]], Any] = list
        self.before_connect: Callable[[], Any] = lambda: None
        self.is_open = True
        self._sent: SimpleQueue[None] = (
            SimpleQueue()
        )  # in C: an exception in a signal handler leaves no lock taken

    def share(self, request: Any) -> float:
        return len(request) / self.most_bytes if self.most_bytes else 0

    def connect(self, seconds: float) -> ScriptedWire:
        self.before_connect()
        self.wires.append(ScriptedWire(self))
        return self.wires[-1]

    async def connect_async(self, seconds: float, receiver: Receiver) -> AsyncScriptedWire:
        waiting = self.before_connect()
        if waiting is not None:
            await waiting
        self.wires.append(ScriptedWire(self))
        return AsyncScriptedWire(self.wires[-1], receiver)

    def failure(self, cause: BaseException) -> StoreError:
        kind = StoreTimeout if isinstance(cause, TimeoutError) else StoreUnavailable
        return kind(f"{type(cause).__name__}: {cause}")

    def may_repeat(self, request: Any, cause: BaseException) -> bool:
        return str(request).startswith("repeat")

    def converse(self, calls: Sequence[RemoteCall]) -> Conversation:
        replies = yield [call.request for call in calls]
        if replies == "too large":
            return calls
        for call, reply in zip(calls, replies, strict=True):
            call.answer(reply)
        return ()

    def sent(self, batch: list[Any]) -> None:
        self.batches.append(batch)
        self._sent.put(None)

    def until_sent(self, batches: int) -> None:
        """Wait until this number of batches was sent."""
        while len(self.batches) < batches:
            self._sent.get(timeout=PATIENCE)

    async def until_sent_async(self, batches: int) -> None:
        """Wait like `until_sent`, in a task."""
        async with asyncio.timeout(PATIENCE):
            while len(self.batches) < batches:  # noqa: ASYNC110  # there are only a few batches
                await asyncio.sleep(0)

    def open(self) -> None:
        """Deliver all replies from now on."""
        self.is_open = True
        for wire in self.wires:
            wire.news()


class ScriptedWire:
    """A connection with the messages that are not answered yet.

    Attributes:
        is_held: Whether replies are kept back on this connection even if the peer is open.
    """

    def __init__(self, peer: ScriptedPeer) -> None:
        self.peer = peer
        self.is_closed = False
        self.has_ended = False
        self.is_held = False
        self.unanswered: deque[list[Any]] = deque()
        self._wakeup = Event()
        self.news: Callable[[], None] = self._wakeup.set

    def is_over(self) -> bool:
        return self.has_ended

    def send(self, message: list[Any]) -> None:
        assert not self.is_closed
        assert len(self.unanswered) <= self.peer.follows, "one batch at a time, or one that follows it"
        self.unanswered.append(message)
        self.peer.sent(message)
        if self.peer.is_open:
            self.news()

    def wait(self, seconds: float) -> bool:
        self._wakeup.wait(seconds)
        return self.peer.is_open

    def receive(self) -> Any:
        assert not self.is_closed
        if not self.peer.is_open or self.is_held or not self.unanswered:
            return PENDING
        reply = self.peer.answer(self.unanswered.popleft())
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def release(self) -> None:
        """Deliver replies again."""
        self.is_held = False
        self.news()

    def close(self) -> None:
        self.is_closed = True


class AsyncScriptedWire:
    """The same connection for tasks."""

    def __init__(self, wire: ScriptedWire, receiver: Receiver) -> None:
        self._wire = wire
        self._receiver = receiver
        self._loop = asyncio.get_running_loop()
        wire.news = lambda: self._loop.call_soon_threadsafe(self._on_news)

    def is_over(self) -> bool:
        return self._wire.is_over()

    def send(self, message: list[Any]) -> None:
        self._wire.send(message)

    def close(self) -> None:
        self._wire.close()

    async def wait_closed(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def _on_news(self) -> None:
        if self._wire.is_closed:
            return
        try:
            reply = self._wire.receive()
        except Exception as error:  # noqa: BLE001  # as scripted
            self._receiver.lose(error)
            return
        if reply is not PENDING:
            self._receiver.receive(reply)
            self._on_news()
