"""Routing in a cluster: the node of each slot, and the engines that send calls there.

A node that does not have a slot answers MOVED, or ASK during a migration, and does nothing else. Only such a request is
sent again, because it cannot charge twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

from redis.exceptions import MovedError

from headgate._concurrency import complete
from headgate._steps import run, run_async
from headgate.errors import StoreError, StoreUnavailable
from headgate.stores.redis.codec import Reply, ScriptCall, command
from headgate.stores.redis.endpoint import RedisEndpoint
from headgate.stores.redis.peer import AskingCall, Command, Redirected
from headgate.stores.redis.slots import slot_of
from headgate.stores.remote.batching import Abandoned
from headgate.stores.remote.encoding import decode
from headgate.stores.remote.tasks import AsyncEngine
from headgate.stores.remote.threads import ThreadEngine

T = TypeVar("T")
E = TypeVar("E", bound=ThreadEngine | AsyncEngine)

Steps = Generator["NodeRequest", Any, T]
"""The steps of a call in a cluster: a generator without I/O that yields requests to nodes."""

MOST_HOPS = 5
_GET_SLOTS = Command(command(b"CLUSTER", b"SLOTS"))

Address = tuple[str, int]


class NodeRequest(NamedTuple):
    """A request to one node of a cluster: a step of a call.

    Attributes:
        endpoint: The node.
        request: The request.
        share: The part of the call's remaining time that the request may take.
    """

    endpoint: RedisEndpoint
    request: ScriptCall | Command
    share: float = 1.0

    def due(self, call_due: float) -> float:
        """Return the monotonic time at which the request fails."""
        now = time.monotonic()
        return now + (call_due - now) * self.share


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
        self._is_stale = True

    def send(self, call: ScriptCall) -> Steps[Reply]:
        """Return the steps that send a call to the node of its slot."""
        if self._is_stale:
            yield from self._read_slots()
        slot, request = slot_of(call), call
        node = self.owner(slot)
        for _ in range(MOST_HOPS):
            try:
                return (yield NodeRequest(node, request))
            except Redirected as redirected:
                error = redirected.error
                address, has_moved = (
                    (error.host or self._first.host, error.port),
                    isinstance(error, MovedError),
                )
                if has_moved:
                    self._owners[error.slot_id] = address
                node = self._first.at(*address)
                kind = ScriptCall if has_moved else AskingCall
                request = kind(call.keys, call.body, call.body_at)
            except StoreUnavailable:
                self._is_stale = True
                raise
        raise StoreUnavailable(f"{self._first.name}: tried {MOST_HOPS} nodes, and none has slot {slot}")

    def owner(self, slot: int) -> RedisEndpoint:
        """Return the last known node of a slot.

        Raises:
            StoreUnavailable: No node has it.
        """
        if (address := self._owners.get(slot)) is None:
            raise StoreUnavailable(f"{self._first.name}: no node of the cluster has slot {slot}")
        return self._first.at(*address)

    def _read_slots(self) -> Steps[None]:
        """Query the nodes one after the other for the slots, each for half of the remaining time."""
        others = [self._first.at(*address) for address in (*self._nodes, *self._first.others)]
        failure: StoreError | None = None
        for endpoint in (*others, self._first):
            try:
                ranges = yield NodeRequest(endpoint, _GET_SLOTS, share=0.5)
                decode(endpoint.name, self._set_slots, ranges)
            except StoreError as error:
                failure = error
            else:
                return
        assert failure is not None  # at least the first node was queried
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
        self._is_stale = False


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
    """An engine for threads that sends each call to the node of its slot."""

    def __init__(self, nodes: Nodes[ThreadEngine], router: ClusterRouter) -> None:
        self._nodes = nodes
        self._router = router

    def call(self, request: ScriptCall, due: float) -> Reply:
        """See `ThreadEngine.call`."""
        return run(
            self._router.send(request),
            lambda step: self._nodes.at(step.endpoint).call(step.request, step.due(due)),
        )


class TaskCluster:
    """An engine for tasks that sends each call to the node of its slot."""

    def __init__(self, nodes: Nodes[AsyncEngine], router: ClusterRouter) -> None:
        self._nodes = nodes
        self._router = router

    async def call(
        self, request: ScriptCall, due: float, must_send: bool = False, abandoned: Abandoned | None = None
    ) -> Reply:
        """See `AsyncEngine.call`."""

        def start(step: NodeRequest) -> Coroutine[Any, Any, Any]:
            on_reply = abandoned if isinstance(step.request, ScriptCall) else None
            return self._nodes.at(step.endpoint).call(step.request, step.due(due), must_send, on_reply)

        work = run_async(self._router.send(request), start)
        return await (complete(work) if must_send else work)

    def tell(self, request: ScriptCall, due: float) -> None:
        """See `AsyncEngine.tell`; the request does not follow a slot that moves at the same time."""
        with suppress(StoreUnavailable):  # the units stay counted until they expire
            self._nodes.at(self._router.owner(slot_of(request))).tell(request, due)
