"""The driver for coroutines: one connection per event loop, and one task that sends batches and receives replies."""

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
from headgate.stores.remote.peer import AsyncWire, Peer

logger = logging.getLogger("headgate")

TURNS = 5
"""Turns of the event loop within which everything that has arrived is read, however long they take."""


class TaskCall(RemoteCall):
    """A call that a task waits for."""

    __slots__ = ("future",)

    future: asyncio.Future[Any]

    def is_abandoned(self) -> bool:
        return self.future.cancelled()

    def deliver(self, reply: Any, error: BaseException | None) -> None:
        self.state = OVER
        if error is None:
            self.future.set_result(reply)
        elif not self.future.done():
            self.future.set_exception(error)


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
        future = self._start(request, due, must_send, abandoned)
        try:
            return await future
        except asyncio.CancelledError:
            if abandoned is not None and future.done() and not future.cancelled() and not future.exception():
                abandoned(future.result())
            raise

    def tell(self, request: Any, due: float) -> None:
        """Send a request whose reply no caller waits for; a failure is logged."""
        self._start(request, due, must_send=True).add_done_callback(_log_failure)

    async def aclose(self) -> None:
        """Close the connection of this event loop when its calls have ended; have other loops do the same."""
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
    ) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        engine = self._by_loop.get(loop)
        if self._is_closed and not (must_send and engine):
            raise StoreUnavailable(f"{self._peer.name}: the store was closed")
        engine = engine or self._open(loop)
        call = TaskCall(request, time.monotonic(), due, must_send, abandoned)
        call.future = loop.create_future()
        engine.start(call)
        return call.future

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
    """Calls of the running event loop to one server."""

    def __init__(self, peer: Peer, deadline: float, on_close: Callable[[], object]) -> None:
        self._peer = peer
        self._batcher = Batcher(peer, deadline, follows=peer.follows)
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._wire: AsyncWire | None = None
        self._runner: asyncio.Task[None] | None = None
        self._abort_cause: Exception | None = None
        self._timer: asyncio.Handle | None = None
        self._timer_due = float("inf")
        self._keeper: AsyncGenerator[None, None] | None = None
        self._closing: asyncio.Task[None] | None = None

    def start(self, call: TaskCall) -> None:
        """Queue a call. It is sent in the next turn of the event loop, together with all others of this turn."""
        self._batcher.add(call)
        if self._runner is None:
            self._start_runner()
        elif self._batcher.batches and self._batcher.may_send():
            try:
                self._send_batches()
            except Exception as cause:  # noqa: BLE001  # no caller may wait for ever
                self._abort(cause)
        if self._batcher.alarm < self._timer_due:
            self._set_timer(call.since)

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
        """End the runner of an event loop that was closed during calls: nothing will run it again."""
        if self._runner is not None:
            coroutine: Any = self._runner.get_coro()
            self._runner._log_destroy_pending = False  # type: ignore[attr-defined]  # there is no public way to say so
            with contextlib.suppress(RuntimeError):  # it would have to wait
                coroutine.close()

    async def _wait_for_calls(self) -> None:
        while self._runner is not None:
            await asyncio.wait([self._runner])

    def _start_runner(self) -> None:
        self._runner = self._loop.create_task(self._run())
        self._runner.add_done_callback(self._on_runner_end)

    def _on_runner_end(self, runner: asyncio.Task[None]) -> None:
        """Start another runner if calls are left, because this one was cancelled, perhaps before its first step."""
        self._runner = None
        if self._batcher.is_busy:
            self._start_runner()

    async def _run(self) -> None:
        """Send and receive until no call is left."""
        if self._keeper is None:
            self._keeper = self._keep()
            await anext(self._keeper)
        if self._wire is not None and await self._wire.is_over():
            await self._hang_up()
        while self._batcher.is_busy:
            try:
                await self._step()
            except asyncio.CancelledError:
                await self._on_cancelled()
            except Exception as cause:  # noqa: BLE001  # no caller may wait for ever
                await self._lose(cause)

    async def _step(self) -> None:
        """Connect, send, or receive one reply."""
        batcher = self._batcher
        if self._wire is None:
            await self._connect()
        elif not batcher.batches:
            self._send_batches()
        else:
            reply = await self._wire.receive()
            batcher.hear(time.monotonic())
            conversation = batcher.batches[0].conversation
            assert conversation is not None
            try:
                message = conversation.send(reply)
            except StopIteration as stop:
                batcher.finish(stop.value)
            else:
                batcher.rotate()
                self._wire.send(message)
            self._send_batches()

    def _send_batches(self) -> None:
        """Send the batches that may be sent now."""
        while self._wire is not None and self._batcher.may_send():
            batch = self._batcher.next_batch(time.monotonic())
            if batch is not None and batch.conversation is not None:
                self._wire.send(next(batch.conversation))

    async def _connect(self) -> None:
        seconds = self._batcher.time_to_connect(time.monotonic())
        try:
            self._wire = await self._peer.connect_async(seconds)
        except Exception as cause:  # noqa: BLE001  # no caller may wait for ever
            self._batcher.cannot_connect(cause)
        else:
            self._batcher.connected()

    def _abort(self, cause: Exception) -> None:
        """Have the runner close the connection, or give up connecting."""
        if self._runner is not None and self._abort_cause is None:
            self._abort_cause = cause
            self._runner.cancel()

    async def _on_cancelled(self) -> None:
        cause = self._abort_cause
        if cause is None:
            # Cancelled by another task, or by the end of the event loop. Calls that were not sent get a new runner.
            self._batcher.drop_abandoned()
            await self._lose(InterruptedError("a task of the event loop was cancelled during a call"))
            raise asyncio.CancelledError
        self._abort_cause = None
        assert self._runner is not None
        self._runner.uncancel()
        if self._wire is None:
            self._batcher.cannot_connect(cause)
        else:
            await self._lose(cause)

    async def _lose(self, cause: BaseException) -> None:
        """Fail the calls that were sent, and close the connection."""
        self._abort_cause = None
        self._batcher.lose(cause)
        await self._hang_up()  # last, because it may take a moment

    async def _hang_up(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            await wire.close()

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
            self._abort(TimeoutError("no reply in time"))
        if self._batcher.is_busy:
            self._set_timer(now)

    async def _keep(self) -> AsyncGenerator[None, None]:
        """Keep the connection open. An event loop that ends properly closes its generators, and so the connection."""
        try:
            yield
        finally:
            await self._wait_for_calls()
            self._on_close()
            if self._timer is not None:
                self._timer.cancel()
            await self._hang_up()


def _log_failure(reply: asyncio.Future[Any]) -> None:
    if not reply.cancelled() and (error := reply.exception()) is not None:
        logger.warning("units could not be returned for a cancelled caller: %s", error)


_inherited: list[object] = []
