"""The driver for coroutines: one connection per event loop. Replies arrive in callbacks; only connecting takes a task."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from headgate._fork import watch
from headgate.errors import StoreUnavailable
from headgate.stores.remote.batching import OVER, Abandoned, Batcher, RemoteCall
from headgate.stores.remote.peer import AsyncWire, Peer, abandon_task

logger = logging.getLogger("headgate")

TURNS = 5
"""Iterations of the event loop in which everything that has arrived is read, regardless of their duration."""


class TaskCall(RemoteCall):
    """A call that a task waits for."""

    __slots__ = ("future",)

    future: asyncio.Future[Any]

    def deliver(self, reply: Any, error: BaseException | None) -> bool:
        self.state = OVER
        if self.future.done():
            return False  # its caller was cancelled
        if error is None:
            self.future.set_result(reply)
        else:
            self.future.set_exception(error)
        return True


class AsyncEngine:
    """Calls of all event loops of this process to one server.

    Args:
        peer: The server.
        deadline: Seconds of silence after which a connection is closed.
    """

    def __init__(self, peer: Peer, deadline: float) -> None:
        self._peer = peer
        self._deadline = deadline
        self._by_loop: dict[asyncio.AbstractEventLoop, LoopEngine] = {}
        self._is_closed = False
        watch(self)

    async def call(
        self, request: Any, due: float, must_send: bool = False, abandoned: Abandoned | None = None
    ) -> Any:
        """Send a request, once, and return its reply.

        If the caller is cancelled, a request that was not sent is dropped, unless it must be sent. `abandoned` is called
        with the reply to one that was sent, even if that has just arrived.

        Raises:
            StoreError: There is no reply.
        """
        call = self._start(request, due, must_send, abandoned)
        try:
            return await call.future
        except asyncio.CancelledError:
            call.has_given_up = True
            if abandoned is not None and _has_reply(call.future):
                abandoned(call.future.result())
            raise

    def tell(self, request: Any, due: float) -> None:
        """Send a request whose reply no caller waits for; a failure is logged."""
        self._start(request, due, must_send=True).future.add_done_callback(_log_failure)

    async def aclose(self) -> None:
        """Close the connection of this event loop when its calls have ended, and schedule the same in other loops."""
        await asyncio.sleep(0)  # callers that were just cancelled release their holds first
        own = self._by_loop.get(asyncio.get_running_loop())
        self.close(own)
        if own is not None:
            await own.aclose()

    def close(self, but: LoopEngine | None = None) -> None:
        """Like `aclose`, without waiting."""
        self._is_closed = True
        self._abandon_closed_loops()
        for loop, engine in list(self._by_loop.items()):
            if engine is not but:
                with contextlib.suppress(RuntimeError):  # that event loop is closed
                    loop.call_soon_threadsafe(engine.close_soon)

    def after_fork_in_child(self) -> None:
        """Leave the parent's connections alone; they are kept, because deleting them could close them."""
        _inherited.append(self._by_loop)
        self._by_loop = {}

    def _start(
        self, request: Any, due: float, must_send: bool, abandoned: Abandoned | None = None
    ) -> TaskCall:
        loop = asyncio.get_running_loop()
        engine = self._by_loop.get(loop)
        if self._is_closed and not (must_send and engine):
            raise StoreUnavailable(f"{self._peer.name}: the store was closed")
        engine = engine or self._open(loop)
        call = TaskCall(request, time.monotonic(), due, must_send, abandoned)
        call.future = loop.create_future()
        engine.start(call)
        return call

    def _open(self, loop: asyncio.AbstractEventLoop) -> LoopEngine:
        self._abandon_closed_loops()
        engine = self._by_loop[loop] = LoopEngine(
            self._peer, self._deadline, lambda: self._by_loop.pop(loop, None)
        )
        return engine

    def _abandon_closed_loops(self) -> None:
        for loop in [loop for loop in list(self._by_loop) if loop.is_closed()]:
            engine = self._by_loop.pop(loop, None)
            if engine is not None:
                engine.abandon()


class LoopEngine:
    """Calls of the running event loop to one server; receives the replies on its connection (`Receiver`)."""

    def __init__(self, peer: Peer, deadline: float, on_close: Callable[[], object]) -> None:
        self._peer = peer
        self._batcher = Batcher(peer, deadline, follows=peer.follows)
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._wire: AsyncWire | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._is_scheduled = False
        self._timer: asyncio.Handle | None = None
        self._timer_due = float("inf")
        self._idle: asyncio.Future[None] | None = None
        self._keeper: AsyncGenerator[None, None] | None = None
        self._closing: asyncio.Task[None] | None = None

    def start(self, call: TaskCall) -> None:
        """Queue a call. It is sent in the next turn of the event loop, together with all others of this turn."""
        self._batcher.add(call)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._send)
        if self._batcher.alarm < self._timer_due:
            self._set_timer(call.since)

    def receive(self, reply: Any) -> None:
        """Answer calls with a reply of the server, and send what can be sent now."""
        assert self._wire is not None
        try:
            message = self._batcher.receive(reply, time.monotonic())
            if message is not None:
                self._wire.send(message)
        except Exception as cause:  # noqa: BLE001  # no caller may wait for ever
            self.lose(cause)
            return
        if self._batcher.waiting or self._idle is not None:
            self._send()

    def lose(self, cause: BaseException) -> None:
        """Close the connection, and fail the calls that were sent; waiting calls get a new connection."""
        self._batcher.lose(cause)
        self._hang_up()
        self._send()

    async def aclose(self) -> None:
        """Wait for calls in progress, then close the connection."""
        await self._wait_for_calls()
        self._on_close()
        if self._keeper is not None:
            await self._keeper.aclose()

    def close_soon(self) -> None:
        """Like `aclose`, without waiting."""
        self._closing = self._loop.create_task(self.aclose())

    def abandon(self) -> None:
        """Stop the tasks of an event loop that was closed during calls: nothing will run them again."""
        abandon_task(self._connecting)
        if self._wire is not None:
            self._wire.abandon()

    def _send(self) -> None:
        """Send the batches that may be sent now, or connect first."""
        self._is_scheduled = False
        batcher = self._batcher
        if self._wire is not None and not batcher.batches and self._wire.is_over():
            self._hang_up()
        if self._wire is None:
            if batcher.waiting and self._connecting is None:
                self._start_connecting()
        else:
            try:
                while (message := batcher.next_message(time.monotonic())) is not None:
                    self._wire.send(message)
            except Exception as cause:  # noqa: BLE001  # no caller may wait for ever
                self.lose(cause)
        if self._idle is not None and not batcher.is_needed:
            self._idle.set_result(None)
            self._idle = None

    def _start_connecting(self) -> None:
        seconds = self._batcher.time_to_connect(time.monotonic())
        self._connecting = self._loop.create_task(self._connect(seconds))
        self._connecting.add_done_callback(self._on_connecting_end)

    async def _connect(self, seconds: float) -> None:
        if self._keeper is None:
            self._keeper = self._keep()
            await anext(self._keeper)
        self._wire = await self._peer.connect_async(seconds, self)

    def _on_connecting_end(self, connecting: asyncio.Task[None]) -> None:
        """Send the waiting calls, or fail them; connect again if another task cancelled it."""
        if connecting is not self._connecting:
            return  # given up
        self._connecting = None
        if connecting.cancelled():
            self._batcher.drop_abandoned()
        elif (cause := connecting.exception()) is not None:
            self._batcher.cannot_connect(cause)
        else:
            self._batcher.connected()
        self._send()

    def _give_up(self) -> None:
        """Close a connection on which the server is silent, or stop connecting."""
        cause = TimeoutError("no reply in time")
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
            self._batcher.cannot_connect(cause)
        self.lose(cause)

    def _hang_up(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = self._batcher.alarm
        self._timer = self._loop.call_later(max(0.0, self._timer_due - now), self._expire_after, TURNS)

    def _expire_after(self, turns: int) -> None:
        """Fail expired calls after some turns of the event loop, in which replies that have arrived are read."""
        if turns > 0:
            self._timer = self._loop.call_soon(self._expire_after, turns - 1)
            return
        self._timer, self._timer_due = None, float("inf")
        now = time.monotonic()
        if now >= self._batcher.alarm and self._batcher.expire(now):
            self._give_up()
        elif self._idle is not None:
            self._send()
        if self._batcher.is_busy:
            self._set_timer(now)

    async def _wait_for_calls(self) -> None:
        while self._batcher.is_needed:
            if self._idle is None:
                self._idle = self._loop.create_future()
            await asyncio.shield(self._idle)

    async def _keep(self) -> AsyncGenerator[None, None]:
        """Keep the connection open. An event loop that ends properly closes its generators, and so the connection."""
        try:
            yield
        finally:
            await self._wait_for_calls()
            self._on_close()
            if self._timer is not None:
                self._timer.cancel()
            wire = self._wire
            self._hang_up()
            if wire is not None:
                await wire.wait_closed()


def _has_reply(future: asyncio.Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _log_failure(reply: asyncio.Future[Any]) -> None:
    if not reply.cancelled() and (error := reply.exception()) is not None:
        logger.warning("units or the ticket of a caller that has left could not be returned: %s", error)


_inherited: list[object] = []
