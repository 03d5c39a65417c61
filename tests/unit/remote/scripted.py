"""A server that answers when it is told to, for the engine of stores over a network."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from headgate.errors import StoreError, StoreTimeout, StoreUnavailable
from headgate.stores.remote.batching import RemoteCall
from headgate.stores.remote.peer import PENDING, Conversation, Receiver
from headgate.stores.remote.wakeup import WakeUp

PATIENCE = 60.0
"""Seconds after which a test fails that waits for something that never happens."""


class ScriptedTime:
    """The time that an engine sees in place of the module `time`: it passes only when a test says so.

    However long this machine is busy, nothing is late then. Engines wait for as long as they think it takes, and look again.
    """

    def __init__(self) -> None:
        self._now = 1000.0

    def monotonic(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the time forward."""
        self._now += seconds


class ScriptedPeer:
    """Answers each request with itself, as soon as it is let.

    Attributes:
        batches: What was sent, in order.
        wires: The connections that were made, in order.
        answer: Makes the reply to the requests of a batch, as a list; an exception is a connection that breaks.
        before_connect: Called before each connection; may wait, or raise.
        is_open: While it is not set, replies are held back.
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
        )  # in C: a signal handler that raises leaves no lock of it taken

    def size(self, request: Any) -> int:
        return len(request)

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
        """Return when so many batches have been sent."""
        while len(self.batches) < batches:
            self._sent.get(timeout=PATIENCE)

    async def until_sent_async(self, batches: int) -> None:
        """As `until_sent`, in a task."""
        async with asyncio.timeout(PATIENCE):
            while len(self.batches) < batches:  # noqa: ASYNC110  # batches come one by one, and few
                await asyncio.sleep(0)

    def open(self) -> None:
        """Let all replies through, from now on."""
        self.is_open = True
        for wire in self.wires:
            wire.news()


class ScriptedWire:
    """A connection; what was sent on it and is not answered.

    Attributes:
        is_held: Whether replies are held back here, whatever the peer does.
    """

    def __init__(self, peer: ScriptedPeer) -> None:
        self.peer = peer
        self.is_closed = False
        self.has_ended = False
        self.is_held = False
        self.under_way: deque[list[Any]] = deque()
        self._wakeup = WakeUp()
        self.news: Callable[[], None] = self._wakeup.set

    def is_over(self) -> bool:
        return self.has_ended

    def send(self, message: list[Any]) -> None:
        assert not self.is_closed
        assert len(self.under_way) <= self.peer.follows, "one batch at a time, or one that follows it"
        self.under_way.append(message)
        self.peer.sent(message)
        if self.peer.is_open:
            self.news()

    def wait(self, seconds: float) -> bool:
        self._wakeup.wait(seconds)
        return self.peer.is_open

    def receive(self) -> Any:
        assert not self.is_closed
        if not self.peer.is_open or self.is_held or not self.under_way:
            return PENDING
        reply = self.peer.answer(self.under_way.popleft())
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def release(self) -> None:
        """Let replies through again."""
        self.is_held = False
        self.news()

    def close(self) -> None:
        self.is_closed = True


class AsyncScriptedWire:
    """The same for tasks."""

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
