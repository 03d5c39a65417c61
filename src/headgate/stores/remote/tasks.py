"""The driver for coroutines: per event loop a few connections, each with a task that carries one batch after another."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

from headgate._fork import watch
from headgate.errors import StoreUnavailable
from headgate.stores.remote.batching import OVER, Abandoned, Batcher, Lane, RemoteCall
from headgate.stores.remote.peer import AsyncWire, Peer, Talk

GRACE = 0.02
"""Seconds. If the event loop was blocked beyond a deadline, replies that are on their way have so much time."""

TURNS = 5
"""In so many turns of the event loop, however long they take, everything that has come is read."""

ENDING = ConnectionAbortedError("the event loop is shutting down")


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


class TaskLane(Lane):
    """A lane, and who sees to it.

    Attributes:
        driver: The task that carries its batches; `None` if it was given up.
        talks: What is said about each batch that is under way.
        trouble: Why a batch could not follow another one, for the driver to hear.
    """

    __slots__ = ("driver", "talks", "trouble")

    def __init__(self) -> None:
        super().__init__()
        self.driver: asyncio.Task[None] | None = None
        self.talks: deque[Talk] = deque()
        self.trouble: Exception | None = None


class AsyncEngine:
    """Calls of all event loops of this process to one server.

    Args:
        peer: The server.
        deadline: Seconds after which a connection that is silent is given up.
    """

    def __init__(self, peer: Peer, deadline: float) -> None:
        self._peer = peer
        self._deadline = deadline
        self._by_loop: dict[asyncio.AbstractEventLoop, LoopEngine] = {}
        self._is_closed = False
        watch(self)

    def start(
        self,
        request: Any,
        due: float,
        source: str = "",
        must_leave: bool = False,
        abandoned: Abandoned | None = None,
    ) -> asyncio.Future[Any]:
        """Send a request, once, and return the future of its reply, which raises what the peer makes of a failure.

        Cancelling the future leaves all other calls alone. A request that has not left by then does not leave, unless it
        must; the reply to one that has left goes to `abandoned`.

        Raises:
            StoreUnavailable: The store was closed.
        """
        loop = asyncio.get_running_loop()
        engine = self._by_loop.get(loop)
        if self._is_closed and not (must_leave and engine):
            raise StoreUnavailable(f"{self._peer.name}: the store was closed")
        engine = engine or self._open(loop)
        call = TaskCall(request, time.monotonic(), due, source, must_leave, abandoned)
        call.future = future = loop.create_future()
        engine.start(call)
        return future

    async def call_async(self, request: Any, due: float, source: str, abandoned: Abandoned) -> Any:
        """Return the reply to a request; if the caller is cancelled `abandoned` gets it, even when it has just come."""
        future = self.start(request, due, source, abandoned=abandoned)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and not future.exception():
                abandoned(future.result())
            raise

    async def aclose(self) -> None:
        """Close the connections of this event loop when its calls have ended, and have others do the same with theirs."""
        own = self._by_loop.get(asyncio.get_running_loop())
        self.close(own)
        if own is not None:
            await own.aclose()

    def close(self, but: LoopEngine | None = None) -> None:
        """As `aclose`, without waiting for any of them."""
        self._is_closed = True
        self._abandon_closed_loops()
        for loop, engine in list(self._by_loop.items()):
            if engine is not but:
                with contextlib.suppress(RuntimeError):  # that event loop is closed
                    loop.call_soon_threadsafe(engine.close_soon)

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

    def after_fork_in_child(self) -> None:
        """Leave the parent's connections alone; they are kept, because forgetting them could close them."""
        _inherited.append(self._by_loop)
        self._by_loop = {}


class LoopEngine:
    """Calls of the running event loop to one server."""

    def __init__(self, peer: Peer, deadline: float, on_close: Callable[[], object]) -> None:
        self._peer = peer
        self._batcher = Batcher(peer, deadline, TaskLane, peer.follows)
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._timer_due = float("inf")
        self._drivers: set[asyncio.Task[None]] = set()
        self._keeper: AsyncGenerator[None, None] | None = None
        self._closing: asyncio.Task[None] | None = None

    def start(self, call: TaskCall) -> None:
        """Take a call. It leaves in the next turn of the event loop, together with all others of this turn."""
        batcher = self._batcher
        if batcher.add(call):
            self._drive_free_lanes(call.since)
        if batcher.alarm < self._timer_due:
            self._set_timer(call.since)

    async def aclose(self) -> None:
        """Let calls that are under way end, then close the connections."""
        while self._drivers:
            await asyncio.wait(self._drivers)
        self._on_close()
        if self._keeper is not None:
            await self._keeper.aclose()

    def close_soon(self) -> None:
        """As `aclose`, without waiting for it."""
        self._closing = self._loop.create_task(self.aclose())

    def abandon(self) -> None:
        """End the drivers of an event loop that was closed during calls: nothing will run them again."""
        for driver in list(self._drivers):
            coroutine: Any = driver.get_coro()
            with contextlib.suppress(RuntimeError):  # it would have to wait
                coroutine.close()
            driver._log_destroy_pending = False  # type: ignore[attr-defined]  # there is no public way to say so

    def _drive_free_lanes(self, now: float, own: TaskLane | None = None) -> bool:
        """Have all lanes driven on which calls can leave; return whether this task is to go on with its own."""
        is_own = own is not None and bool(own.talks) and own.driver is _this_task()
        while (lane := self._batcher.next_lane(now)) is not None:
            if lane.batch:
                self._loop.call_soon(self._follow, lane)
            elif own is not None and lane is own:
                lane.driver, is_own = _this_task(), True
            else:
                lane.driver = self._loop.create_task(self._drive(lane))
                self._drivers.add(lane.driver)
        return is_own

    async def _drive(self, lane: TaskLane) -> None:
        """Carry one batch after another, until there is nothing to carry."""
        is_first, this_task = True, _this_task()
        try:
            if self._keeper is None:
                self._keeper = self._keep()
                await anext(self._keeper)
            goes_on = True
            while goes_on:
                try:
                    await self._round_trip(lane, is_first)
                except asyncio.CancelledError:
                    cause, lane.trouble = lane.trouble, None
                    if lane.driver is None or cause is not None:
                        # Given up for its silence, or for what `_follow` found.
                        this_task.uncancel()
                        await self._lose(lane, cause)
                    else:  # the event loop ends
                        self._batcher.fail_waiting(ENDING)
                        await self._lose(lane, ENDING)
                        raise
                is_first = False
                # Not as long as the lane is busy: another task may have taken it since this one has left it.
                goes_on = self._drive_free_lanes(time.monotonic(), lane)
        finally:
            # Here, and not when the task is done: a call that comes in between would wait for a driver that has left.
            self._drivers.discard(this_task)

    async def _round_trip(self, lane: TaskLane, is_first: bool) -> None:
        """Send a batch unless one is under way, and hear the next reply."""
        wire, batcher, talks = lane.wire, self._batcher, lane.talks
        if not talks:
            if wire is not None and is_first and await wire.is_over():
                await self._hang_up(lane)
                wire = None
            if wire is None:
                wire = await self._connect(lane)
                if wire is None:
                    return
        try:
            if not talks:
                if not self._send(lane, is_first):
                    return
                self._drive_free_lanes(time.monotonic())  # enough may wait to follow at once
            reply = await wire.receive()
            batcher.hear(lane, time.monotonic())
            try:
                wire.send(talks[0].send(reply))
            except StopIteration as stop:
                talks.popleft()
                batcher.finish(lane, stop.value)
            else:
                talks.rotate(-1)
                batcher.swap(lane)
                batcher.leave(lane, time.monotonic())
        except Exception as cause:  # noqa: BLE001  # whatever it is, no caller may wait for ever
            await self._lose(lane, cause)

    def _send(self, lane: TaskLane, after_pause: bool = False) -> bool:
        """Send the next batch on a lane; return whether there is one."""
        calls = self._batcher.take(lane, time.monotonic(), after_pause)
        if calls:
            talk = self._peer.talk(calls)
            lane.talks.append(talk)
            lane.wire.send(next(talk))
            self._batcher.leave(lane, time.monotonic())
        return bool(calls)

    def _follow(self, lane: TaskLane) -> None:
        """Send the next batch on a lane without waiting for the one that is under way there, if it still is."""
        if len(lane.talks) == 1 and lane.driver is not None:
            try:
                self._send(lane)
            except Exception as cause:  # noqa: BLE001  # see above
                lane.trouble = cause
                lane.driver.cancel()
            self._drive_free_lanes(time.monotonic())  # limiters that have become slow do not follow

    async def _connect(self, lane: TaskLane) -> AsyncWire | None:
        seconds = self._batcher.time_to_connect(lane, time.monotonic())
        due = lane.sent + seconds
        try:
            async with asyncio.timeout(seconds):
                lane.wire = await self._peer.connect_async(seconds)
        except Exception as cause:  # noqa: BLE001  # see above
            now = time.monotonic()
            if isinstance(cause, TimeoutError) and max(now, lane.sent + seconds) > due + GRACE:
                # The event loop was blocked or busy: it is not known who was slow, and what is not due is tried again.
                self._batcher.finish(lane)
            else:
                self._batcher.cannot_connect(lane, cause, now)
            return None
        wire: AsyncWire = lane.wire
        return wire

    async def _lose(self, lane: TaskLane, cause: BaseException | None) -> None:
        """Fail what is under way on a lane; without a cause, because the server was silent."""
        wire = lane.wire
        lane.talks.clear()
        if cause is None:
            self._batcher.give_up(lane)
        else:
            self._batcher.lose(lane, cause)
        if wire is not None:
            await wire.close()  # last, because it may take a moment

    async def _hang_up(self, lane: TaskLane) -> None:
        wire, lane.wire = lane.wire, None
        if wire is not None:
            await wire.close()

    def _set_timer(self, now: float) -> None:
        """See to it that somebody looks when the next call is due."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = self._batcher.alarm
        self._timer = self._loop.call_later(max(0.0, self._timer_due - now), self._on_due)

    def _on_due(self) -> None:
        now = time.monotonic()
        late = now - self._timer_due
        if late > GRACE:  # the event loop was blocked
            self._timer = self._loop.call_later(GRACE, self._expire_after, TURNS, late, now + GRACE)
        else:
            self._expire_after(TURNS, 0.0, now)

    def _expire_after(self, turns: int, late: float, since: float) -> None:
        """Fail the calls that are due, after so many turns of the event loop: replies may be there and just unread."""
        if turns > 0:
            self._timer = self._loop.call_soon(self._expire_after, turns - 1, late, since)
            return
        self._timer, self._timer_due = None, float("inf")
        now = time.monotonic()
        for lane in self._batcher.expire(now, late, now - since) if now >= self._batcher.alarm else ():
            driver, lane.driver = lane.driver, None
            if driver is not None:
                driver.cancel()
        self._drive_free_lanes(now)
        if self._batcher.alarm < float("inf"):
            self._set_timer(now)

    async def _keep(self) -> AsyncGenerator[None, None]:
        """Hold the connections open. An event loop that ends properly closes its generators, and thereby these."""
        try:
            yield
        finally:
            self._on_close()
            if self._timer is not None:
                self._timer.cancel()
            self._batcher.fail_waiting(ENDING)
            for lane in self._batcher.lanes:
                await self._hang_up(lane)


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


_inherited: list[object] = []
