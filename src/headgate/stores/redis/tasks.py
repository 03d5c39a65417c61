"""Calls from coroutines: those that wait while a round trip is under way leave together in the next one.

One connection per event loop serves all of its tasks. A call that finds it idle leaves at once; one that finds it busy waits
for the round trip that is under way, and then leaves with everybody else who waits. No timer, nothing to tune: the busier
it is, the more calls share a round trip.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import NamedTuple

from redis.exceptions import AskError, NoScriptError, RedisError, ResponseError

from headgate._fork import watch
from headgate.errors import StoreUnavailable
from headgate.stores.redis.codec import ASKING, Reply, ScriptCall, call_by_name, call_by_text
from headgate.stores.redis.endpoint import AsyncConnection, Endpoint, is_read_only

MOST_PER_CALL = 128
"""How many requests leave together at most: the server does nothing else while it works on them."""

MANY = 32
"""From how many on those who have gathered leave in two halves."""

GRACE = 0.1
"""Seconds. After the event loop was blocked for longer than half of it, a round trip has so much more time."""

Abandoned = Callable[[Reply], None]
"""Takes the reply to a request that its caller no longer waits for."""


class Call(NamedTuple):
    """A request on its way, and who waits for its reply."""

    request: ScriptCall
    future: asyncio.Future[Reply]
    abandoned: Abandoned | None
    asking: bool


Group = Callable[[ScriptCall], int]
"""Returns what the requests of one script call must have in common."""


class Pipes:
    """The pipes of this process to one server, one per event loop.

    Args:
        endpoint: The server.
        deadline: Seconds that a call may take.
        group: In a cluster, what the requests of one script call must have in common.
    """

    def __init__(self, endpoint: Endpoint, deadline: float, group: Group | None = None) -> None:
        self.endpoint = endpoint
        self._deadline = deadline
        self._group = group
        self._by_loop: dict[asyncio.AbstractEventLoop, Pipe] = {}
        self._closed = False
        watch(self)

    def call(
        self, request: ScriptCall, abandoned: Abandoned | None = None, asking: bool = False
    ) -> asyncio.Future[Reply]:
        """As `Pipe.call`, in the running event loop."""
        pipe = self._by_loop.get(asyncio.get_running_loop()) or self._open()
        return pipe.call(request, abandoned, asking)

    async def call_watched(self, request: ScriptCall, abandoned: Abandoned, asking: bool = False) -> Reply:
        """As `call`; if the caller is cancelled, `abandoned` gets the reply even when it has just come."""
        future = self.call(request, abandoned, asking)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and not future.exception():
                abandoned(future.result())
            raise

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

    def _open(self) -> Pipe:
        if self._closed:
            raise StoreUnavailable(f"{self.endpoint.name}: the store was closed")
        for loop in list(self._by_loop):
            if loop.is_closed():
                self._by_loop.pop(loop, None)
        loop = asyncio.get_running_loop()
        pipe = self._by_loop[loop] = Pipe(
            self.endpoint, self._deadline, self._group, lambda: self._by_loop.pop(loop, None)
        )
        return pipe

    def after_fork_in_child(self) -> None:
        """Leave the parent's connections alone; they are kept, because forgetting them would close them."""
        _inherited.append(self._by_loop)
        self._by_loop = {}


class Pipe:
    """The connection of the running event loop to one server, and the calls that wait for it."""

    def __init__(
        self, endpoint: Endpoint, deadline: float, group: Group | None, on_close: Callable[[], object]
    ) -> None:
        self.endpoint = endpoint
        self._deadline = deadline
        self._group = group
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Call] = deque()
        self._driver: asyncio.Task[None] | None = None
        self._connection: AsyncConnection | None = None
        self._keeper: AsyncGenerator[None, None] | None = None
        self._timer: asyncio.TimerHandle
        self._is_overdue = False
        self._is_demoted = False
        self._closing: asyncio.Task[None] | None = None

    def call(self, request: ScriptCall, abandoned: Abandoned | None, asking: bool) -> asyncio.Future[Reply]:
        """Send a request, once, and return the future of its reply.

        Cancelling the future leaves everybody else's calls alone. A request that has not left by then does not leave; the
        reply to one that has goes to `abandoned`.

        The future raises StoreUnavailable or StoreConflict; in a cluster also redis-py's AskError and MovedError.
        """
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._waiting.append(Call(request, future, abandoned, asking))
        if self._driver is None:
            self._driver = self._loop.create_task(self._drive())
        return future

    async def aclose(self) -> None:
        """Let calls that are under way end, then close the connection."""
        self._on_close()
        if self._driver is not None:
            await asyncio.wait([self._driver])
        if self._keeper is not None:
            await self._keeper.aclose()

    def close_soon(self) -> None:
        """As `aclose`, without waiting for it."""
        self._closing = self._loop.create_task(self.aclose())

    async def _drive(self) -> None:
        """Make round trips until nobody waits any more."""
        try:
            # Of many who have gathered, the first half leaves first: from then on there are always replies to work on
            # here while the server works on requests. Were all to leave together, the two would take turns.
            most = MOST_PER_CALL
            if len(self._waiting) >= MANY:
                most = min(most, len(self._waiting) // 2)
            while batch := self._next_batch(most):
                await self._round_trip(batch)
                most = MOST_PER_CALL
        finally:
            self._driver = None

    def _next_batch(self, most: int) -> list[Call]:
        waiting = self._waiting
        batch: list[Call] = []
        while waiting and len(batch) < most:
            call = waiting.popleft()
            if not call.future.done():
                batch.append(call)
        return batch

    async def _round_trip(self, batch: list[Call]) -> None:
        """Send a batch and hand over its replies."""
        due = self._loop.time() + self._deadline
        self._timer = self._loop.call_at(due, self._on_due, due)
        try:
            await self._exchange(batch)
        except asyncio.CancelledError:
            await self._hang_up()
            # Those who wait have not left, and fail too: they would only find out once more that nobody answers.
            everybody = [*batch, *self._waiting]
            self._waiting.clear()
            if not self._is_overdue:
                self._fail(everybody, ConnectionAbortedError("the event loop is shutting down"))
                raise
            self._driver.uncancel()  # type: ignore[union-attr]  # this is the driver
            self._fail(everybody, TimeoutError(f"nothing heard in {self._deadline:g} s"))
        except Exception as error:  # noqa: BLE001  # whatever it is, nobody must wait for ever
            await self._hang_up()
            self._fail(batch, error)
        finally:
            self._timer.cancel()
            self._is_overdue = False

    def _on_due(self, due: float) -> None:
        if self._loop.time() > due + GRACE / 2:
            # The timer itself is late, so the event loop was blocked: the reply may be there and just unread.
            self._timer = self._loop.call_later(GRACE, self._expire)
        else:
            self._expire()

    def _expire(self) -> None:
        self._is_overdue = True
        self._driver.cancel()  # type: ignore[union-attr]  # the timer runs only while it does

    async def _exchange(self, batch: list[Call]) -> None:
        connection = await self._connected()
        groups = self._groups(batch)
        forgotten = await self._run(connection, groups, call_by_name)
        if forgotten:
            # A new server, or one that was told to forget the script: nothing of these was done yet.
            await self._run(connection, forgotten, call_by_text)
        if self._is_demoted:
            # No longer the primary: the next round trip looks for it anew.
            self._is_demoted = False
            await self._hang_up()

    async def _run(
        self,
        connection: AsyncConnection,
        groups: Sequence[Sequence[Call]],
        packed: Callable[[Sequence[ScriptCall]], list[bytes]],
    ) -> list[Sequence[Call]]:
        """Send groups of calls together, hand over their replies, and return the groups that need the script first."""
        commands: list[bytes] = []
        for group in groups:
            commands += ASKING if group[0].asking else []
            commands += packed([call.request for call in group])
        await connection.send_packed_command(commands, check_health=False)
        forgotten = []
        for group in groups:
            try:
                if group[0].asking:
                    await connection.read_response(disable_decoding=True)
                replies = await connection.read_response(disable_decoding=True)
            except NoScriptError:
                forgotten.append(group)
            except ResponseError as error:
                self._fail(group, error)
            else:
                self._hand_over(group, replies)
        return forgotten

    def _hand_over(self, group: Sequence[Call], replies: Sequence[Reply]) -> None:
        for call, reply in zip(group, replies, strict=True):
            _, future, abandoned, _ = call
            if isinstance(reply, ResponseError):
                self._fail([call], reply)
                self._is_demoted = self._is_demoted or is_read_only(reply)
            elif not future.done():
                future.set_result(reply)
            elif abandoned is not None:
                abandoned(reply)

    def _fail(self, calls: Iterable[Call], cause: Exception) -> None:
        """Fail those that have no reply yet, each with an exception of its own."""
        for call in calls:
            if call.future.done():
                continue
            if self._group is not None and isinstance(cause, AskError):  # or MovedError, which is one
                call.future.set_exception(cause)
                continue
            error = self.endpoint.error(cause)
            error.__cause__ = self.endpoint.presentable(cause)
            call.future.set_exception(error)

    def _groups(self, batch: list[Call]) -> Sequence[Sequence[Call]]:
        if self._group is None:
            return (batch,)
        groups: dict[tuple[int, bool], list[Call]] = {}
        for call in batch:
            groups.setdefault((self._group(call.request), call.asking), []).append(call)
        return tuple(groups.values())

    async def _connected(self) -> AsyncConnection:
        connection = self._connection
        if connection is None:
            connection = self._connection = self.endpoint.async_connection(self._deadline)
            self._keeper = self._keep()
            await anext(self._keeper)
        elif connection.is_connected and await _is_over(connection):
            # A server that was restarted has closed it. To notice that before anything is sent is not to send twice.
            await connection.disconnect(nowait=True)
        if not connection.is_connected:
            await connection.connect()
        return connection

    async def _hang_up(self) -> None:
        if self._connection is not None:
            await self._connection.disconnect(nowait=True)

    async def _keep(self) -> AsyncGenerator[None, None]:
        """Hold the connection open. An event loop that ends properly closes its generators, and thereby this one."""
        try:
            yield
        finally:
            self._on_close()
            await self._hang_up()


async def _is_over(connection: AsyncConnection) -> bool:
    """Tell whether a connection that nobody waits on has something to say, which can only be that it is over."""
    # Before redis-py 8 it went by the longer name, which is now deprecated.
    can_read = getattr(connection, "can_read", None) or connection.can_read_destructive
    try:
        return bool(await can_read())
    except (RedisError, OSError):
        return True


_inherited: list[object] = []
