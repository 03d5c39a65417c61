"""Routing in a cluster: the node of each slot, and the drivers of operations that send requests to several nodes.

A node that does not have a slot answers MOVED, or ASK during a migration, before it does anything. Such a request may be
sent again without charging twice; no other request is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from redis.exceptions import MovedError

from headgate.errors import StoreError, StoreUnavailable
from headgate.stores.redis.cluster_operations import Steps, slot_of
from headgate.stores.redis.codec import Reply, ScriptCall, command
from headgate.stores.redis.endpoint import RedisEndpoint
from headgate.stores.redis.peer import AskingCall, Command, Redirected
from headgate.stores.remote.batching import Abandoned
from headgate.stores.remote.encoding import decode
from headgate.stores.remote.tasks import AsyncEngine
from headgate.stores.remote.threads import ThreadEngine

T = TypeVar("T")
E = TypeVar("E", bound=ThreadEngine | AsyncEngine)

MOST_HOPS = 5
_GET_SLOTS = Command(command(b"CLUSTER", b"SLOTS"))

Address = tuple[str, int]


class NodeRequest(NamedTuple):
    """A request to one node of a cluster: a step of an operation.

    Attributes:
        endpoint: The node.
        request: The request.
        share: The part of the operation's remaining time that the request may take.
    """

    endpoint: RedisEndpoint
    request: ScriptCall | Command
    share: float = 1.0

    def due(self, operation_due: float) -> float:
        """Return the monotonic time at which the request fails."""
        now = time.monotonic()
        return now + (operation_due - now) * self.share


class ClusterRouter:
    """Finds the node of each call, and follows slots that move; shared by all threads and tasks of a store.

    The map of slots is read again after a node could not be reached, because another node may have taken over its slots.

    Args:
        first: A node of the cluster.
    """

    def __init__(self, first: RedisEndpoint) -> None:
        self._first = first
        self._owners: dict[int, Address] = {}
        self._nodes: list[Address] = []

    def send(self, call: ScriptCall) -> Steps[Reply]:
        """Return the steps that send a call to the node of its slot."""
        if not self._owners:
            yield from self._read_slots()
        slot, request = slot_of(call), call
        if (address := self._owners.get(slot)) is None:
            raise StoreUnavailable(f"{self._first.name}: no node of the cluster has slot {slot}")
        for _ in range(MOST_HOPS):
            try:
                return (yield NodeRequest(self._first.at(*address), request))
            except Redirected as redirected:
                error = redirected.error
                address, has_moved = (
                    (error.host or self._first.host, error.port),
                    isinstance(error, MovedError),
                )
                if has_moved:
                    self._owners[error.slot_id] = address
                kind = ScriptCall if has_moved else AskingCall
                request = kind(call.keys, call.body, call.body_at)
            except StoreUnavailable:
                self._owners = {}
                raise
        raise StoreUnavailable(f"{self._first.name}: {MOST_HOPS} nodes were asked, and none has slot {slot}")

    def _read_slots(self) -> Steps[None]:
        """Ask one node after the other for the slots, each for half of the remaining time."""
        others = [self._first.at(*address) for address in (*self._nodes, *self._first.others)]
        failure: StoreError | None = None
        for endpoint in (*others, self._first):
            try:
                self._set_slots((yield NodeRequest(endpoint, _GET_SLOTS, share=0.5)))
            except StoreError as error:
                failure = error
            else:
                return
        assert failure is not None  # at least the first node was asked
        raise failure

    def _set_slots(self, ranges: list[list[Any]]) -> None:
        """Store the reply to CLUSTER SLOTS."""
        owners: dict[int, Address] = {}
        for start, end, (host, port, *_), *_ in ranges:
            # An empty host means the node that replied.
            address = ((host or b"").decode() or self._first.host, int(port))
            owners.update(dict.fromkeys(range(start, end + 1), address))
        self._owners = owners
        self._nodes = sorted(set(owners.values()))


class Nodes(Generic[E]):
    """The engines of a store's nodes, created when they are needed."""

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
        """Close all engines, including later ones."""
        self._is_closed = True
        for engine in list(self._engines.values()):
            engine.close()

    async def aclose(self: Nodes[AsyncEngine]) -> None:
        """Like `close`, for coroutines."""
        self._is_closed = True
        for engine in list(self._engines.values()):
            await engine.aclose()


class ThreadCluster:
    """An engine for threads whose requests are the steps of operations in a cluster.

    If a signal handler raises, the remaining steps are dropped: units may stay charged, but none are freed.
    """

    def __init__(self, nodes: Nodes[ThreadEngine]) -> None:
        self._nodes = nodes

    def call(self, steps: Steps[T], due: float) -> T:
        """Run the steps of an operation, and return its result."""
        outcome: Any = None
        try:
            while True:
                step = _next(steps, outcome)
                try:
                    outcome = self._nodes.at(step.endpoint).call(step.request, step.due(due))
                except StoreError as error:
                    outcome = error
        except StopIteration as stop:
            result: T = stop.value
            return result


class TaskCluster:
    """An engine for tasks whose requests are the steps of operations in a cluster.

    Every operation is completed, even if its caller is cancelled, so that it charges all slots or none.
    """

    def __init__(self, nodes: Nodes[AsyncEngine]) -> None:
        self._nodes = nodes
        self._running: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def call(
        self, steps: Steps[T], due: float, must_send: bool = False, abandoned: Abandoned | None = None
    ) -> T:
        """Run the steps of an operation, and return its result; if the caller is cancelled, call `abandoned` with it."""
        if self._is_closed and not must_send:
            raise StoreUnavailable("the store was closed")
        task = self._start(steps, due)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if abandoned is not None:
                task.add_done_callback(partial(_pass_on, abandoned))
            raise

    def tell(self, steps: Steps[T], due: float) -> None:
        """Run the steps of an operation whose result no caller waits for."""
        self._start(steps, due)

    async def aclose(self) -> None:
        """Wait for the operations of this event loop, and for the refunds of callers that were just cancelled."""
        self._is_closed = True
        loop = asyncio.get_running_loop()
        for _ in range(2):  # such a caller first has to notice it
            await asyncio.sleep(0)
        while running := [task for task in list(self._running) if task.get_loop() is loop]:
            await asyncio.wait(running)

    def _start(self, steps: Steps[T], due: float) -> asyncio.Task[T]:
        task = asyncio.create_task(self._run(steps, due))
        self._running.add(task)  # an event loop keeps only weak references to tasks
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved; the caller raises it, unless it was cancelled

    async def _run(self, steps: Steps[T], due: float) -> T:
        outcome: Any = None
        try:
            while True:
                step = _next(steps, outcome)
                try:
                    outcome = await self._nodes.at(step.endpoint).call(step.request, step.due(due))
                except StoreError as error:
                    outcome = error
        except StopIteration as stop:
            result: T = stop.value
            return result


def _pass_on(abandoned: Abandoned, task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is None:
        abandoned(task.result())


def _next(steps: Steps[T], outcome: Any) -> NodeRequest:
    """Return the next step, given the reply to the last one or its error; `None` before the first.

    Raises:
        StopIteration: The operation has ended; the exception has its result.
        StoreConflict: The reply is invalid.
    """
    step: NodeRequest
    if outcome is None:
        step = steps.send(None)
    elif isinstance(outcome, StoreError):
        step = steps.throw(outcome)
    else:
        step = decode("a node of the cluster", steps.send, outcome)
    return step
