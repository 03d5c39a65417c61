"""Calls from coroutines: those that wait while round trips are under way leave together in the next one.

A few connections per event loop serve all of its tasks. A call that finds one idle leaves at once; one that finds all busy
waits, and then leaves with everybody else who waits, as one batch. No timer, nothing to tune: the busier it is, the more
calls share a round trip. HTTP is why: 64 tasks that each send requests of their own make some 400 calls a second, and ten
thousand this way (httpx 0.28, two cores shared with the server).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import NamedTuple

from headgate._fork import watch
from headgate.client.endpoint import Endpoint, is_lost, unpacked
from headgate.client.wire import HttpRequest, Response, alone, batch_answers, batch_request
from headgate.errors import StoreConflict, StoreError

LANES = 4
"""How many round trips may be under way at once, so that one that waits for a slow store does not hold up all others."""

MOST_PER_BATCH = 128
MOST_BYTES = 32_768
"""How much leaves together at most, so that nobody waits long for others and the server takes it."""

GRACE = 0.1
"""Seconds. After the event loop was blocked for longer than half of it, a round trip has so much more time."""

TOO_LARGE = 413

Abandoned = Callable[[Response], None]
"""Takes the answer to a request that its caller no longer waits for."""


class Call(NamedTuple):
    """A request on its way, and who waits for its answer."""

    request: HttpRequest
    future: asyncio.Future[Response]
    abandoned: Abandoned | None
    is_repeated: bool = False


class _TooLarge(Exception):
    """The server takes less at once than we thought. Nothing of the batch was done, so each call leaves alone."""


class Pipes:
    """The pipes of this process to one server, one per event loop.

    Args:
        endpoint: The server.
        deadline: Seconds that a round trip may take.
    """

    def __init__(self, endpoint: Endpoint, deadline: float) -> None:
        self.endpoint = endpoint
        self._deadline = deadline
        self._by_loop: dict[asyncio.AbstractEventLoop, Pipe] = {}
        self._closed = False
        watch(self)

    async def call(self, request: HttpRequest) -> Response:
        """Return the answer to a request. If the caller is cancelled before the request has left, it does not leave.

        Raises:
            StoreError: There is no answer.
        """
        return await self._pipe().call(request)

    async def call_watched(self, request: HttpRequest, abandoned: Abandoned) -> Response:
        """As `call`; if the caller is cancelled, `abandoned` gets the answer, even when it has just come."""
        future = self._pipe().call(request, abandoned)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and not future.exception():
                abandoned(future.result())
            raise

    async def call_to_the_end(self, request: HttpRequest) -> Response:
        """As `call`, but the request leaves even if the caller is cancelled."""
        return await asyncio.shield(self.start(request))

    def start(self, request: HttpRequest) -> asyncio.Future[Response]:
        """Send a request that need not be waited for."""
        future = self._pipe().call(request)
        future.add_done_callback(_seen)
        return future

    async def aclose(self) -> None:
        """Close the pipe of this event loop when its calls have ended, and tell the others to do the same."""
        self._closed = True
        here = asyncio.get_running_loop()
        for loop, pipe in list(self._by_loop.items()):
            if loop is here:
                await pipe.aclose()
            elif not loop.is_closed():
                loop.call_soon_threadsafe(pipe.close_soon)

    def close(self) -> None:
        """As `aclose`, from a thread without an event loop: none is waited for."""
        self._closed = True
        for loop, pipe in list(self._by_loop.items()):
            if not loop.is_closed():
                loop.call_soon_threadsafe(pipe.close_soon)

    def _pipe(self) -> Pipe:
        loop = asyncio.get_running_loop()
        return self._by_loop.get(loop) or self._open(loop)

    def _open(self, loop: asyncio.AbstractEventLoop) -> Pipe:
        if self._closed:
            raise self.endpoint.closed()
        for other in list(self._by_loop):
            if other.is_closed():
                self._by_loop.pop(other, None)
        pipe = self._by_loop[loop] = Pipe(
            self.endpoint, self._deadline, lambda: self._by_loop.pop(loop, None)
        )
        return pipe

    def after_fork_in_child(self) -> None:
        """Leave the parent's connections alone; they are kept, because forgetting them would close them."""
        _inherited.append(self._by_loop)
        self._by_loop = {}


class Pipe:
    """The connections of the running event loop to a server, and the calls that wait for one."""

    def __init__(self, endpoint: Endpoint, deadline: float, on_close: Callable[[], object]) -> None:
        self.endpoint = endpoint
        self._deadline = deadline
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Call] = deque()
        self._drivers: set[asyncio.Task[None]] = set()
        self._transport = endpoint.async_transport()
        self._keeper: AsyncGenerator[None, None] | None = None
        self._closing: asyncio.Task[None] | None = None

    def call(self, request: HttpRequest, abandoned: Abandoned | None = None) -> asyncio.Future[Response]:
        """Send a request and return the future of its answer, which raises StoreError if there is none.

        Cancelling the future leaves everybody else's calls alone. A request that has not left by then does not leave; the
        answer to one that has goes to `abandoned`.
        """
        future: asyncio.Future[Response] = self._loop.create_future()
        self._waiting.append(Call(request, future, abandoned))
        if len(self._drivers) < LANES:
            self._drivers.add(self._loop.create_task(self._drive()))
        return future

    async def aclose(self) -> None:
        """Let calls that are under way end, then close the connections."""
        self._on_close()
        if self._drivers:
            await asyncio.wait(self._drivers)
        if self._keeper is not None:
            await self._keeper.aclose()

    def close_soon(self) -> None:
        """As `aclose`, without waiting for it."""
        self._closing = self._loop.create_task(self.aclose())

    async def _drive(self) -> None:
        """Make round trips until nobody waits any more."""
        try:
            if self._keeper is None:
                self._keeper = self._keep()
                await anext(self._keeper)
            while batch := self._next_batch():
                await self._round_trip(batch)
        finally:
            # Here, and not when the task is done: a call that comes in between would wait for a driver that has left.
            self._drivers.discard(asyncio.current_task())

    def _next_batch(self) -> list[Call]:
        """Return those who leave next; one that cannot be in a batch leaves alone."""
        batch: list[Call] = []
        size = 0
        while self._waiting and len(batch) < MOST_PER_BATCH:
            call = self._waiting[0]
            if not call.future.done():
                entry = call.request.entry
                size += MOST_BYTES if entry is None else len(entry)
                if batch and size > MOST_BYTES:
                    break
                batch.append(call)
            self._waiting.popleft()
        return batch

    async def _round_trip(self, batch: list[Call]) -> None:
        """Send a batch and hand over its answers."""
        exchange = self._loop.create_task(self._exchange(batch))
        try:
            in_time = await self._ends_in_time(exchange)
        except asyncio.CancelledError:
            exchange.cancel()
            self._fail([*batch, *self._give_up()], ConnectionAbortedError("the event loop is shutting down"))
            raise
        if not in_time:
            exchange.cancel()
            await asyncio.wait([exchange])
            # Those who wait have not left, and fail too: they would only find out once more that nobody answers.
            self._fail([*batch, *self._give_up()], TimeoutError())
        elif isinstance(cause := exchange.exception(), _TooLarge):
            self._waiting.extendleft(call._replace(request=alone(call.request)) for call in reversed(batch))
        elif cause is not None:
            self._fail(batch, cause)
        else:
            self._hand_over(batch, exchange.result())

    async def _ends_in_time(self, exchange: asyncio.Task[list[Response]]) -> bool:
        due = self._loop.time() + self._deadline
        done, _ = await asyncio.wait([exchange], timeout=self._deadline)
        if not done and self._loop.time() > due + GRACE / 2:
            # This comes late, so the event loop was blocked: the answer may be there and just unread.
            done, _ = await asyncio.wait([exchange], timeout=GRACE)
        return bool(done)

    async def _exchange(self, batch: list[Call]) -> list[Response]:
        if len(batch) == 1:
            return [await self._send(batch[0].request)]
        answer = await self._send(batch_request([call.request.entry or b"" for call in batch]))
        if answer.status == TOO_LARGE:
            raise _TooLarge
        return batch_answers(answer, len(batch))

    async def _send(self, request: HttpRequest) -> Response:
        response = await self._transport.handle_async_request(self.endpoint.packed(request, None))
        try:
            await response.aread()
        finally:
            await response.aclose()
        return unpacked(response)

    def _hand_over(self, batch: list[Call], answers: list[Response]) -> None:
        for call, answer in zip(batch, answers, strict=True):
            if not call.future.done():
                call.future.set_result(answer)
            elif call.abandoned is not None:
                call.abandoned(answer)

    def _give_up(self) -> list[Call]:
        """Return those who wait; they no longer do."""
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting

    def _fail(self, calls: Iterable[Call], cause: BaseException) -> None:
        """Fail those that have no answer, each with an exception of its own; what may be repeated leaves again, once."""
        for call in calls:
            if call.future.done():
                continue
            if call.request.may_repeat and not call.is_repeated and is_lost(cause):
                self._waiting.append(call._replace(is_repeated=True))
                continue
            error = self._error(cause)
            error.__cause__ = cause
            call.future.set_exception(error)

    def _error(self, cause: BaseException) -> StoreError:
        if isinstance(cause, ValueError):
            return StoreConflict(f"{self.endpoint.name} did not answer as a Headgate server does: {cause}")
        return self.endpoint.error(cause)

    async def _keep(self) -> AsyncGenerator[None, None]:
        """Hold the connections open. An event loop that ends properly closes its generators, and thereby these."""
        try:
            yield
        finally:
            self._on_close()
            await self._transport.aclose()


def _seen(future: asyncio.Future[Response]) -> None:
    """Look at an error that nobody may be waiting for any more."""
    if not future.cancelled():
        future.exception()


_inherited: list[object] = []
