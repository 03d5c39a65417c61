"""Calls from coroutines: those that wait while a round trip is under way leave together in the next one.

One connection per event loop serves all of its tasks. A call that finds it idle leaves at once; one that finds it busy waits
for the round trip that is under way, and then leaves with everybody else who waits. No timer, nothing to tune: the busier
it is, the more calls share a round trip.

There is no task that drives this: the event loop calls back when a reply has come, and that is where the next calls leave.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

from psycopg import OperationalError

from headgate._fork import watch
from headgate.errors import StoreUnavailable
from headgate.stores.postgres.codec import Arguments, NoteCall, Reply, StateCall, many, numbers, one, split
from headgate.stores.postgres.endpoint import (
    CLEAN,
    FAILURES,
    MANY,
    NOTE,
    ONE,
    Endpoint,
    Overdue,
    Refused,
    Statement,
    Wire,
    blames_one,
    spares_connection,
)
from headgate.stores.postgres.janitor import Janitor

logger = logging.getLogger("headgate")

MOST_PER_CALL = 128
"""How many requests leave together at most. Their keys stay locked until all of them are done."""

Abandoned = Callable[[Reply], None]
"""Takes the reply to a request that its caller no longer waits for."""


class Call:
    """A request on its way, and who waits for its reply."""

    __slots__ = ("abandoned", "due", "future", "must_leave", "request")

    def __init__(
        self,
        request: StateCall | NoteCall,
        future: asyncio.Future[Any],
        due: float,
        must_leave: bool = False,
        abandoned: Abandoned | None = None,
    ) -> None:
        self.request = request
        self.future = future
        self.due = due
        self.must_leave = must_leave
        self.abandoned = abandoned

    def answer(self, reply: Any) -> None:
        """Hand over the reply."""
        if not self.future.done():
            self.future.set_result(reply)
        elif self.abandoned is not None:
            self.abandoned(reply)

    def fail(self, error: BaseException) -> None:
        """Hand over why there is no reply."""
        if not self.future.done():
            self.future.set_exception(error)


class Pipe:
    """The connection of the running event loop to a database, and the calls that wait for it."""

    def __init__(self, endpoint: Endpoint, durable: bool) -> None:
        self.endpoint = endpoint
        self._durable = b"t" if durable else b"f"
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Call] = deque()
        # Those who leave alone: for a note; or because one of several spoilt a call for all.
        self._alone: deque[Call] = deque()
        self._under_way: Sequence[Call] = ()
        self._is_cleaning = False
        self._janitor = Janitor()
        self._wire: Wire | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._idle: asyncio.Future[None] | None = None  # for who closes
        self._closed = False

    def call(
        self,
        request: StateCall,
        deadline: float,
        *,
        must_leave: bool = False,
        abandoned: Abandoned | None = None,
    ) -> asyncio.Future[Reply]:
        """Send a request, once, and return the future of the numbers of its reply.

        Cancelling the future leaves everybody else's calls alone. A request that has not left by then does not leave,
        unless it must; the reply to one that has goes to `abandoned`. The future raises StoreUnavailable or
        StoreConflict.
        """
        future: asyncio.Future[Reply] = self._loop.create_future()
        due = time.monotonic() + deadline
        self._queue(self._waiting, Call(request, future, due, must_leave, abandoned))
        return future

    def note(self, request: NoteCall, deadline: float) -> asyncio.Future[bytes | None]:
        """Send a note, once, and return the future of what is kept under its name; as `call`."""
        future: asyncio.Future[bytes | None] = self._loop.create_future()
        self._queue(self._alone, Call(request, future, time.monotonic() + deadline))
        return future

    async def aclose(self) -> None:
        """Let calls that are under way or waiting end, then close the connection."""
        self._closed = True
        if self._is_busy:
            self._idle = self._loop.create_future()
            await self._idle
        self._hang_up()

    def close(self) -> None:
        """Close the connection; calls that are under way fail."""
        self._closed = True
        self._fail_all(ConnectionAbortedError("the store was closed"))

    def _queue(self, queue: deque[Call], call: Call) -> None:
        if self._closed:
            raise StoreUnavailable(f"{self.endpoint.name}: the store was closed")
        queue.append(call)
        if not self._under_way:
            self._leave()
        if self._timer is None or self._timer_due > call.due:
            self._keep_time(call.due)

    @property
    def _is_busy(self) -> bool:
        return bool(self._under_way) or self._is_cleaning or self._connecting is not None

    def _leave(self) -> None:
        """Send those who wait, if there are any and nothing else is under way."""
        if self._is_busy:
            return
        if not self._waiting and not self._alone:
            self._rest()
            return
        if self._wire is None or self._wire.is_over():
            self._hang_up()
            self._connecting = self._loop.create_task(self._connect())
            return
        batch = [self._alone.popleft()] if self._alone else self._next_batch()
        if not batch:
            self._rest()
            return
        self._under_way = batch
        request = batch[0].request
        if isinstance(request, NoteCall):
            self._send(self._wire, NOTE, request.arguments(self._durable))
        elif len(batch) == 1 and request.is_single:
            self._send(self._wire, ONE, one(request, self._durable))
        else:
            self._send(self._wire, MANY, many(_requests(batch), self._durable))

    def _next_batch(self) -> list[Call]:
        waiting = self._waiting
        batch: list[Call] = []
        while waiting and len(batch) < MOST_PER_CALL:
            call = waiting.popleft()
            if call.must_leave or not call.future.done():
                batch.append(call)
        return batch

    def _send(self, wire: Wire, statement: Statement, arguments: Arguments) -> None:
        try:
            if wire.send(statement, arguments):
                self._loop.add_writer(wire.fileno, self._on_writable, wire)
        except FAILURES as cause:
            self._loop.call_soon(self._break, cause)

    def _on_writable(self, wire: Wire) -> None:
        try:
            if wire is self._wire and wire.flush():
                return
            self._loop.remove_writer(wire.fileno)
        except FAILURES as cause:
            self._break(cause)

    def _on_readable(self, wire: Wire) -> None:
        if wire is not self._wire:
            return
        if not self._under_way and not self._is_cleaning:
            if wire.is_over():
                self._hang_up()
            return
        try:
            if wire.receive():
                self._hand_over(wire)
                self._leave()
        except FAILURES as cause:
            self._break(cause)

    def _hand_over(self, wire: Wire) -> None:
        """Read the reply that has come, and tell everybody what it is."""
        batch, self._under_way = self._under_way, ()
        was_cleaning, self._is_cleaning = self._is_cleaning, False
        try:
            value = wire.value()
        except Refused as cause:
            if was_cleaning:
                logger.warning("%s", self.endpoint.error(cause))
            elif len(batch) > 1 and blames_one(cause):
                self._alone.extend(batch)
            else:
                self._fail(batch, cause)
            if not spares_connection(cause):
                self._hang_up()
            return
        except OperationalError:
            self._under_way = batch
            raise
        if was_cleaning:
            self._janitor.cleaned(value)
            return
        if isinstance(batch[0].request, NoteCall):
            batch[0].answer(value)
            return
        requests, reply = _requests(batch), numbers(value)
        replies = [reply] if len(batch) == 1 else split(requests, reply)
        new = 0
        for call, request, own in zip(batch, requests, replies, strict=True):
            new += request.new_states(own)
            call.answer(own)
        if new and (arguments := self._janitor.next(new)) is not None:
            # What has become fresh is cleared away now and then, in a round trip of its own.
            self._is_cleaning = True
            self._send(wire, CLEAN, arguments)

    async def _connect(self) -> None:
        due = min((call.due for call in (*self._alone, *self._waiting)), default=time.monotonic())
        try:
            wire = await self._loop.run_in_executor(None, self.endpoint.connect, due)
        except FAILURES as cause:
            self._connecting = None
            self._fail_all(cause)
            return
        except asyncio.CancelledError:
            self._connecting = None
            self._fail_all(ConnectionAbortedError("the event loop is shutting down"))
            raise
        self._connecting = None
        if self._closed and not self._waiting and not self._alone:
            wire.close()
            self._rest()
            return
        self._wire = wire
        self._loop.add_reader(wire.fileno, self._on_readable, wire)
        self._leave()

    def _break(self, cause: BaseException) -> None:
        """Fail those whose reply is lost, and go on without this connection."""
        batch, self._under_way = self._under_way, ()
        self._is_cleaning = False
        self._hang_up()
        self._fail(batch, cause)
        self._leave()

    def _keep_time(self, due: float) -> None:
        """See to it that somebody looks when a call is due."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._on_due)
        self._timer_due = due

    def _on_due(self) -> None:
        self._timer = None
        calls = [*self._under_way, *self._alone, *self._waiting]
        if not calls:
            return
        now = time.monotonic()
        # If the event loop was blocked, the reply may be there and just unread: then nobody is late.
        if self._wire is not None and self._wire.has_news():
            self._keep_time(now + 0.1)
        elif any(call.due <= now for call in calls):
            # Those who wait have not left, and fail too: they would only find out once more that nobody answers.
            self._fail_all(Overdue())
        else:
            self._keep_time(min(call.due for call in calls))

    def _fail_all(self, cause: BaseException) -> None:
        calls = [*self._under_way, *self._alone, *self._waiting]
        self._under_way = ()
        self._is_cleaning = False
        self._alone.clear()
        self._waiting.clear()
        self._hang_up()
        self._fail(calls, cause)
        self._rest()

    def _fail(self, calls: Sequence[Call], cause: BaseException) -> None:
        """Fail calls, each with an exception of its own."""
        for call in calls:
            error = self.endpoint.error(cause)
            error.__cause__ = None if isinstance(cause, Overdue) else cause
            call.fail(error)

    def _hang_up(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(wire.fileno)
                self._loop.remove_writer(wire.fileno)
            wire.close()

    def _rest(self) -> None:
        """Tell who waits for it that nothing is under way any more."""
        if self._idle is not None and not self._idle.done() and not self._is_busy:
            self._idle.set_result(None)


def _requests(batch: Sequence[Call]) -> list[StateCall]:
    """Return the requests of a batch that is not a note."""
    return cast(list[StateCall], [call.request for call in batch])


class Pipes:
    """The pipes of this process to one database, one per event loop."""

    def __init__(self, endpoint: Endpoint, durable: bool) -> None:
        self.endpoint = endpoint
        self._durable = durable
        self._closed = False
        self._pipes: dict[asyncio.AbstractEventLoop, Pipe] = {}
        self._latest: tuple[asyncio.AbstractEventLoop | None, Pipe | None] = None, None
        watch(self)

    def call(
        self,
        request: StateCall,
        deadline: float,
        *,
        must_leave: bool = False,
        abandoned: Abandoned | None = None,
    ) -> asyncio.Future[Reply]:
        """Send a request on the pipe of the running event loop; see `Pipe.call`."""
        loop, pipe = self._latest
        if pipe is None or asyncio.get_running_loop() is not loop:
            pipe = self._of_running_loop()
        return pipe.call(request, deadline, must_leave=must_leave, abandoned=abandoned)

    def note(self, request: NoteCall, deadline: float) -> asyncio.Future[bytes | None]:
        """Send a note on the pipe of the running event loop; see `Pipe.note`."""
        return self._of_running_loop().note(request, deadline)

    def close(self) -> None:
        """Close all connections: each in its event loop, as soon as that runs."""
        self._closed = True
        for loop, pipe in self._forget():
            if not loop.is_closed():
                loop.call_soon_threadsafe(pipe.close)

    async def aclose(self) -> None:
        """Let the calls of the running event loop end and close its connection, and those of others as `close` does."""
        own = self._pipes.pop(asyncio.get_running_loop(), None)
        self.close()
        if own is not None:
            await own.aclose()

    def _of_running_loop(self) -> Pipe:
        if self._closed:
            raise StoreUnavailable(f"{self.endpoint.name}: the store was closed")
        running = asyncio.get_running_loop()
        for loop in [loop for loop in self._pipes if loop.is_closed()]:
            self._pipes.pop(loop).close()
        if running not in self._pipes:
            self._pipes[running] = Pipe(self.endpoint, self._durable)
        self._latest = running, self._pipes[running]
        return self._pipes[running]

    def _forget(self) -> list[tuple[asyncio.AbstractEventLoop, Pipe]]:
        pipes, self._pipes, self._latest = list(self._pipes.items()), {}, (None, None)
        return pipes

    def after_fork_in_child(self) -> None:
        """Forget the parent's connections; libpq's wrapper does not close one in a process that did not open it."""
        self._forget()
