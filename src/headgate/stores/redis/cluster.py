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
from headgate.stores.remote.encoding import EncodedRequest
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


class ClusterRouter:
    """Finds the node of each request of a flow, and follows slots that move.

    Args:
        first: A node of the cluster.
    """

    def __init__(self, first: RedisEndpoint) -> None:
        self._slots = SlotMap(first)

    def route(self, flow: Flow[T], due: float) -> Route[T]:
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


class ThreadCluster:
    """Sends the requests of flows to the nodes of a cluster, for threads. It is an engine whose requests are flows."""

    def __init__(self, router: ClusterRouter, nodes: Nodes[ThreadEngine]) -> None:
        self._router = router
        self._nodes = nodes

    def call(
        self, flow: Flow[T], due: float, must_send: bool = False, abandoned: Abandoned | None = None
    ) -> T:
        """Send the requests of a flow, and return its result.

        If the thread is interrupted, a flow that must be sent or has an `abandoned` is completed after the reply to its
        current request, which the next call to that node reads; then `abandoned` is called with its result.
        """
        return self._carry(self._router.route(flow, due), None, must_send, abandoned)

    def tell(self, flow: Flow[T], due: float) -> None:
        """Like `call`, without a result."""
        self.call(flow, due, must_send=True)

    def _carry(self, route: Route[T], outcome: Any, must_send: bool, abandoned: Abandoned | None) -> T:
        """Continue a route, given the outcome of its last step, and return its result."""
        is_completed = must_send or abandoned is not None
        given_up = partial(self._complete_in_thread, route, abandoned) if is_completed else None
        try:
            while True:
                step = _next(route, outcome)
                try:
                    outcome = self._nodes.at(step.endpoint).call(step.request, step.due, must_send, given_up)
                except StoreError as error:
                    outcome = error
                must_send = is_completed
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _complete_in_thread(self, *args: Any) -> None:
        """Complete a route whose thread was interrupted; the thread that read the reply must not wait for it."""
        with suppress(RuntimeError):  # no thread can be started: the units count until they expire
            threading.Thread(target=self._complete, args=args, daemon=True, name="headgate cluster").start()

    def _complete(self, route: Route[T], abandoned: Abandoned | None, reply: Reply) -> None:
        try:
            result = self._carry(route, reply, True, abandoned)
            if abandoned is not None:
                abandoned(result)
        except HeadgateError as error:
            logger.warning("an interrupted operation could not be completed: %s", error)


class TaskCluster:
    """Sends the requests of flows to the nodes of a cluster, for tasks. It is an engine whose requests are flows.

    Every flow is completed, also if its caller is cancelled: over several slots it is all or nothing only then.
    """

    def __init__(self, router: ClusterRouter, nodes: Nodes[AsyncEngine]) -> None:
        self._router = router
        self._nodes = nodes
        self._running: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def call(
        self, flow: Flow[T], due: float, must_send: bool = False, abandoned: Abandoned | None = None
    ) -> T:
        """Send the requests of a flow, and return its result; if the caller is cancelled, `abandoned` is called with it."""
        if self._is_closed and not must_send:
            raise StoreUnavailable("the store was closed")
        task = self._start(flow, due)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if abandoned is not None:
                task.add_done_callback(partial(_pass_on, abandoned))
            raise

    def tell(self, flow: Flow[T], due: float) -> None:
        """Send the requests of a flow whose result no caller waits for."""
        self._start(flow, due)

    async def aclose(self) -> None:
        """Wait for the flows of this event loop, and for the refunds of callers that were cancelled just now."""
        self._is_closed = True
        loop = asyncio.get_running_loop()
        for _ in range(2):  # such a caller first has to notice it
            await asyncio.sleep(0)
        while running := [task for task in list(self._running) if task.get_loop() is loop]:
            await asyncio.wait(running)

    def _start(self, flow: Flow[T], due: float) -> asyncio.Task[T]:
        task = asyncio.create_task(self._carry(flow, due))
        self._running.add(task)  # an event loop keeps only weak references to tasks
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # the caller has seen it, unless it was cancelled

    async def _carry(self, flow: Flow[T], due: float) -> T:
        route, outcome = self._router.route(flow, due), None
        try:
            while True:
                step = _next(route, outcome)
                try:
                    outcome = await self._nodes.at(step.endpoint).call(step.request, step.due)
                except StoreError as error:
                    outcome = error
        except StopIteration as stop:
            result: T = stop.value
            return result


def _pass_on(abandoned: Abandoned, task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is None:
        abandoned(task.result())


class ClusterEncoder:
    """Encodes the operations of a limiter's gate as flows; see `RequestEncoder`. The reply to a flow is its result."""

    def __init__(self, flows: Flows) -> None:
        self._flows = flows

    def ask(self, request: Request) -> EncodedRequest[Answer]:
        return self._flows.ask(request), _same

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> EncodedRequest[None]:
        return self._flows.refund(receipts, cost, now), _same

    def reset(self, key: Key | None) -> EncodedRequest[None]:
        return self._flows.reset(key), _same


def _next(steps: Generator[S, Any, Any], outcome: Any) -> S:
    """Return the next step, given the reply to the last one or its error; `None` before the first.

    Raises:
        StopIteration: There is none; it has what the steps have led to.
    """
    return steps.throw(outcome) if isinstance(outcome, StoreError) else steps.send(outcome)


def _same(result: T) -> T:
    return result
