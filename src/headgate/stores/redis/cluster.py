"""Which node of a cluster has which slot, and calls that follow it when it moves.

A node that does not have a slot says so before it does anything (MOVED, or ASK while the slot is on its way), so these
answers may be followed without charging twice; nothing else is sent again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from redis.exceptions import AskError, MovedError

from headgate.costs import Costs
from headgate.errors import HeadgateError, StoreError, StoreUnavailable
from headgate.keys import Key
from headgate.stores.base import Answer, Receipts
from headgate.stores.redis.codec import Reply, ScriptCall, command
from headgate.stores.redis.endpoint import RedisEndpoint
from headgate.stores.redis.flows import Flow, Flows, slot_of
from headgate.stores.redis.peer import AskingCall, Command, Redirected
from headgate.stores.remote.batching import Abandoned
from headgate.stores.remote.gates import Ask
from headgate.stores.remote.tasks import AsyncEngine
from headgate.stores.remote.threads import ThreadEngine
from headgate.stores.request import Request

logger = logging.getLogger("headgate")

S = TypeVar("S")
T = TypeVar("T")
E = TypeVar("E", bound=ThreadEngine | AsyncEngine)

MOST_HOPS = 5
_ASK_FOR_SLOTS = Command(command(b"CLUSTER", b"SLOTS"))

Address = tuple[str, int]


class SlotMap:
    """Who has which slot, as far as is known; shared by all threads and tasks of a store.

    It is read anew after a node could not be reached: another one may have taken over its slots.
    """

    def __init__(self, first: RedisEndpoint) -> None:
        self._first = first
        self._owners: dict[int, Address] = {}
        self._nodes: list[Address] = []

    @property
    def is_known(self) -> bool:
        """Whether it has been read."""
        return bool(self._owners)

    def endpoint(self, address: Address) -> RedisEndpoint:
        """Return the endpoint of a node."""
        return self._first.at(*address)

    def sources(self) -> list[RedisEndpoint]:
        """Return whom to ask for the slots, one after the other."""
        known = (self.endpoint(address) for address in (*self._nodes, *self._first.others))
        return [*known, self._first]

    def owner(self, slot: int) -> Address:
        """Return who has a slot.

        Raises:
            StoreUnavailable: No node has it.
        """
        try:
            return self._owners[slot]
        except KeyError:
            raise StoreUnavailable(f"{self._first.name}: no node of the cluster has slot {slot}") from None

    def read(self, ranges: list[list[Any]]) -> None:
        """Take over the reply to CLUSTER SLOTS."""
        owners: dict[int, Address] = {}
        for start, end, (host, port, *_), *_ in ranges:
            # A node that does not know its own name means the one that was asked.
            address = ((host or b"").decode() or self._first.host, int(port))
            owners.update(dict.fromkeys(range(start, end + 1), address))
        self._owners = owners
        self._nodes = sorted(set(owners.values()))

    def follow(self, error: AskError) -> tuple[Address, bool]:
        """Return where a node sends us, and whether the slot is only on its way there."""
        address = (error.host or self._first.host, error.port)
        if isinstance(error, MovedError):
            self._owners[error.slot_id] = address
            return address, False
        return address, True

    def forget(self) -> None:
        """Read it anew at the next call."""
        self._owners = {}

    def lost(self) -> StoreUnavailable:
        """Return the error of a call that was sent around in circles."""
        return StoreUnavailable(f"{self._first.name}: after {MOST_HOPS} nodes, none has the slot")


class ClusterStep(NamedTuple):
    """A request to one node, and when the call that it belongs to is due."""

    endpoint: RedisEndpoint
    request: ScriptCall | Command
    due: float


Route = Generator[ClusterStep, Reply, T]
"""The steps of an operation: each is sent the reply, or thrown the error."""


class Nodes(Generic[E]):
    """The engines of a store's nodes, made when they are needed."""

    def __init__(self, make: Callable[[RedisEndpoint], E]) -> None:
        self._make = make
        self._engines: dict[str, E] = {}
        self._is_closed = False

    def at(self, endpoint: RedisEndpoint) -> E:
        """Return the engine of a node."""
        engine = self._engines.get(endpoint.name)
        if engine is None:
            engine = self._engines.setdefault(endpoint.name, self._make(endpoint))
            if self._is_closed:
                engine.close()
        return engine

    def close(self) -> None:
        """Close all engines; there will be none any more that is open."""
        self._is_closed = True
        for engine in list(self._engines.values()):
            engine.close()

    async def aclose(self: Nodes[AsyncEngine]) -> None:
        """As `close`, for coroutines."""
        self._is_closed = True
        for engine in list(self._engines.values()):
            await engine.aclose()


class Cluster:
    """Where the requests of an operation go. It carries flows to all nodes as an engine carries requests to one.

    Args:
        first: A node of it.
        threads: What carries the requests of threads to each node.
        tasks: The same of tasks.
    """

    def __init__(self, first: RedisEndpoint, threads: Nodes[ThreadEngine], tasks: Nodes[AsyncEngine]) -> None:
        self._slots = SlotMap(first)
        self._threads = threads
        self._tasks = tasks
        self._running: set[asyncio.Task[Any]] = set()

    def call(
        self,
        flow: Flow[T],
        due: float,
        source: str = "",
        must_leave: bool = False,
        abandoned: Abandoned | None = None,
    ) -> T:
        """Make the calls that a flow asks for, from a thread, and return what it returns.

        If the thread is interrupted, what must leave or has an `abandoned` is carried to its end once the reply to what is
        under way has been read, which the next call to that node does; then `abandoned` gets what the flow returns.
        """
        return self._carry(self._route(flow, due), None, source, must_leave, abandoned)

    def tell(self, flow: Flow[T], due: float, source: str) -> None:
        """As `call`; what it returns is of no interest."""
        self.call(flow, due, source, True)

    def _carry(
        self, route: Route[T], outcome: Any, source: str, must_leave: bool, abandoned: Abandoned | None
    ) -> T:
        """Go on with a route, given the outcome of its last step, and return what it returns."""
        is_ended = must_leave or abandoned is not None
        given_up = partial(self._end_in_thread, route, source, abandoned) if is_ended else None
        try:
            while True:
                step = _next(route, outcome)
                engine = self._threads.at(step.endpoint)
                try:
                    outcome = engine.call(step.request, step.due, source, must_leave, given_up)
                except StoreError as error:
                    outcome = error
                must_leave = is_ended  # what has begun is ended
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _end_in_thread(self, *args: Any) -> None:
        """Carry on with a route whose thread was interrupted; the thread that has read the reply must not wait for that."""
        with suppress(RuntimeError):  # there can be no more threads: the units count until they expire
            threading.Thread(target=self._end, args=args, daemon=True, name="headgate ends").start()

    def _end(self, route: Route[T], source: str, abandoned: Abandoned | None, reply: Reply) -> None:
        try:
            result = self._carry(route, reply, source, True, abandoned)
            if abandoned is not None:
                abandoned(result)
        except HeadgateError as error:
            logger.warning("an operation whose thread was interrupted could not be ended: %s", error)

    def start(
        self, flow: Flow[T], due: float, source: str = "", must_leave: bool = False
    ) -> asyncio.Future[T]:
        """Make the calls that a flow asks for, even if no caller waits for the result.

        So also those of a hit that was cancelled: in several slots, they are all or nothing only if they are ended.
        """
        return asyncio.shield(self._run(flow, due, source))

    async def call_async(self, flow: Flow[T], due: float, source: str, abandoned: Abandoned) -> T:
        """Return what a flow returns; if the caller is cancelled, `abandoned` gets it."""
        task = self._run(flow, due, source)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(partial(self._hand_over, abandoned))
            raise

    def _hand_over(self, abandoned: Abandoned, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is None:
            abandoned(task.result())

    def _run(self, flow: Flow[T], due: float, source: str) -> asyncio.Task[T]:
        task = asyncio.create_task(self._follow_async(flow, due, source))
        self._running.add(task)  # an event loop alone does not keep its tasks
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # the caller has seen it, unless it was cancelled

    async def _follow_async(self, flow: Flow[T], due: float, source: str) -> T:
        route, outcome = self._route(flow, due), None
        try:
            while True:
                step = _next(route, outcome)
                try:
                    outcome = await self._tasks.at(step.endpoint).start(step.request, step.due, source)
                except StoreError as error:
                    outcome = error
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _route(self, flow: Flow[T], due: float) -> Route[T]:
        """Return the steps of a flow, all of them by the same deadline."""
        outcome: Any = None
        try:
            while True:
                request = _next(flow, outcome)
                try:
                    outcome = yield from self._follow(request, due)
                except StoreError as error:
                    outcome = error
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _follow(self, request: ScriptCall, due: float) -> Route[Reply]:
        """Send a request to the node that has its slot, wherever that is by now."""
        slots = self._slots
        if not slots.is_known:
            yield from self._read_slots(due)
        address = slots.owner(slot_of(request))
        for _ in range(MOST_HOPS):
            try:
                return (yield ClusterStep(slots.endpoint(address), request, due))
            except Redirected as redirected:
                address, is_asking = slots.follow(redirected.error)
                kind = AskingCall if is_asking else ScriptCall
                request = kind(request.keys, request.body, request.body_at)
            except StoreUnavailable:
                slots.forget()
                raise
        raise slots.lost()

    def _read_slots(self, due: float) -> Route[None]:
        """Ask one node after the other, each for half of the time that is left."""
        failure: StoreError | None = None
        for endpoint in self._slots.sources():
            now = time.monotonic()
            try:
                self._slots.read((yield ClusterStep(endpoint, _ASK_FOR_SLOTS, now + (due - now) / 2)))
            except StoreError as error:
                failure = error
            else:
                return
        assert failure is not None  # there is at least the node that was given
        raise failure


class ClusterAsks:
    """What the operations of a limiter's gate ask of a cluster; see `Asks`. The reply to a flow is what it returns."""

    def __init__(self, flows: Flows) -> None:
        self._flows = flows

    def ask(self, request: Request) -> Ask[Answer]:
        return self._flows.ask(request), _same

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> Ask[None]:
        return self._flows.refund(receipts, cost, now), _same

    def reset(self, key: Key | None) -> Ask[None]:
        return self._flows.reset(key), _same


def _next(steps: Generator[S, Any, Any], outcome: Any) -> S:
    """Return the next step, given the reply to the last one or its error; `None` before the first.

    Raises:
        StopIteration: There is none; it has what the steps have led to.
    """
    return steps.throw(outcome) if isinstance(outcome, StoreError) else steps.send(outcome)


def _same(result: T) -> T:
    return result
