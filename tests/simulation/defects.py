"""Defects that are reintroduced on purpose, to prove that the simulator finds them.

The first three are seeded bugs of the fault runs, with the same frequency (`tests/faults/broken.py`). The others were once
in the code, and are named in CHANGELOG.md or docs/proof.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

from psycopg import OperationalError

import headgate.stores.remote.threads as driver
from headgate import AsyncHold, StoreUnavailable
from headgate.algorithms import TokenBucket
from headgate.client.peer import ServerPeer
from headgate.decision import Decision
from headgate.stores.postgres import peer as postgres
from headgate.stores.redis.endpoint import is_read_only
from headgate.stores.redis.peer import RedisPeer
from headgate.stores.remote import batching, tasks
from headgate.stores.remote._async import gate as gates
from headgate.stores.remote._async.gate import AsyncRemoteGate
from headgate.stores.remote.tasks import AsyncEngine
from headgate.stores.request import Request
from tests.faults.broken import FAILS_OPEN_AT, FORGETS_ONE_IN, LEAKS_ONE_IN
from tests.simulation.run import Outcome, run

Patch = tuple[Any, str, Any]
"""An object, the name of an attribute, and its new value."""


class Defect(NamedTuple):
    """A defect.

    Attributes:
        name: A short description.
        store: The store that shows it.
        patches: The patches that put it back.
        faults: The faults of the runs; random ones by default.
        seed: A seed that finds it.
        plan: Fields of the plan that are not random, to find a rare defect in less time.
    """

    name: str
    store: str
    patches: tuple[Patch, ...] | Callable[[Random], tuple[Patch, ...]]
    faults: tuple[str, ...] | None = None
    seed: int = 0
    plan: Mapping[str, Any] = MappingProxyType({})

    def run(self, seed: int) -> Outcome:
        """Run a simulation of the code as it is."""
        return run(seed, self.store, self.faults, **self.plan)


def run_with(defect: Defect, seed: int) -> Outcome:
    """Run one simulation of the code with a defect; the seed also decides when a rare defect occurs."""
    with put_back(defect, seed):
        return defect.run(seed)


@contextmanager
def put_back(defect: Defect, seed: int) -> Iterator[None]:
    """Reintroduce a defect within a block."""
    patches = defect.patches(Random(seed)) if callable(defect.patches) else defect.patches
    with ExitStack() as stack:
        for target, name, value in patches:
            stack.enter_context(patch.object(target, name, value))
        yield


_decide = AsyncRemoteGate.decide
_release_request = gates.release_request
_drained = TokenBucket._drained


def _forgets(rng: Random) -> tuple[Patch, ...]:
    """Admit one request in ten thousand without counting it."""

    async def decide(self: Any, request: Request) -> Any:
        if request.operation == "hit" and not rng.randrange(FORGETS_ONE_IN):
            request = Request("peek", request.key, request.cost, request.tier, request.now, request.quotas)
        return await _decide(self, request)

    return ((AsyncRemoteGate, "decide", decide),)


def _fails_open(rng: Random) -> tuple[Patch, ...]:
    """Admit one request of a run beyond the limit."""
    numbers = count()

    async def decide(self: Any, request: Request) -> Any:
        decision, receipts = await _decide(self, request)
        if request.operation == "hit" and not decision and next(numbers) == FAILS_OPEN_AT:
            admitted = [(True, limit, left, None, reset) for _, limit, left, _, reset in decision.fields]
            return Decision.make(decision.names, admitted), None
        return decision, receipts

    return ((AsyncRemoteGate, "decide", decide),)


def _leaks(rng: Random) -> tuple[Patch, ...]:
    """Do not release one cancelled hold in a thousand."""

    def release_request(*arguments: Any) -> Any:
        return None if not rng.randrange(LEAKS_ONE_IN) else _release_request(*arguments)

    return ((gates, "release_request", release_request),)


async def _renew_with_new_lease(self: Any, *, now: float | None = None) -> Decision:
    """Take new places, then return the old ones; a caller that is cancelled in between loses the new ones."""
    request = self._renewal(now)
    if request is None:
        return self.decision.as_refused()
    hold = Request("hold", request.key, request.cost, request.tier, request.now, request.quotas)
    decision, new = await self._gate.decide(hold)
    if new is not None:
        await self._gate.refund(self.receipts, request.cost, request.now)
        self.receipts = new
    return decision


def _answer_replica_as_reset(self: Any, calls: Any, reply: Any) -> Any:
    """Treat the error of a replica as a closed connection."""
    try:
        return _answer(self, calls, reply)
    except Exception as error:
        if is_read_only(error):
            raise ConnectionResetError(f"{self.name} may no longer write") from error
        raise


_answer = RedisPeer._answer


def _receive_late(self: Any) -> Any:
    """Check for the end of the connection before reading the buffered replies."""
    try:
        self.pgconn.consume_input()
    except OperationalError as error:
        if self._result is None:
            raise
        raise postgres.Terminated(self._result.get_error_message()) from error
    return self._read()


def _start_unless_closed(self: Any, *arguments: Any, **options: Any) -> Any:
    if self._is_closed:
        raise StoreUnavailable("the store was closed")
    return _start(self, *arguments, **options)


_start = AsyncEngine._start


async def _call_without_release(
    self: Any, request: Any, due: float, must_send: bool = False, abandoned: Any = None
) -> Any:
    """Ignore a reply that arrives together with the cancellation of its caller."""
    return await self._start(request, due, must_send, abandoned).future


async def _call_unless_cancelled(
    self: Any, request: Any, due: float, must_send: bool = False, abandoned: Any = None
) -> Any:
    return await _call(self, request, due, False, abandoned)


_call = AsyncEngine.call


def _drained_if_changed(self: Any, state: Any, now: int, birth: int) -> Any:
    """Drop the units taken in another tier."""
    if state is not None and state[4:] != (self.n, self.d, self.burst):
        state = None
    return _drained(self, state, now, birth)


def _may_always_repeat(self: Any, request: Any, cause: BaseException) -> bool:
    return isinstance(cause, ConnectionResetError)


def _never_repeats(self: Any, request: Any, cause: BaseException) -> bool:
    return False


def _without_lock(lock: object, work: Callable[..., Any], *arguments: Any) -> Any:
    return work(*arguments)


SLOW_HITS = {
    "actors": 12,
    "calls": 150,
    "cancels": 0,
    "max_pause": 0.2,
    "bursts": 0,
    "resets": 0,
    "exits": False,
}
"""Calls with pauses, so that most calls are admitted."""
CANCELLED_HOLDS = {"actors": 12, "calls": 100, "cancels": 0.4, "max_pause": 0.2, "bursts": 0, "resets": 0}

DEFECTS = (
    Defect("forgets one charge in 10,000", "redis", _forgets, (), 14, SLOW_HITS),
    Defect("fails open once", "redis", _fails_open, (), 42),
    Defect("leaks one cancelled hold in 1,000", "redis", _leaks, (), 73, CANCELLED_HOLDS),
    Defect("renews with a new lease", "redis", ((AsyncHold, "renew", _renew_with_new_lease),), ()),
    Defect(
        "takes a replica for an outage",
        "redis",
        ((RedisPeer, "_answer", _answer_replica_as_reset),),
        ("demote",),
        seed=17,
    ),
    Defect(
        "loses replies with the end of a connection",
        "postgres",
        ((postgres.PostgresWire, "receive", _receive_late), (batching, "MOST_PER_BATCH", 2)),
        ("restart", "block"),
        seed=4,
    ),
    Defect(
        "loses refunds on close",
        "redis",
        ((AsyncEngine, "_start", _start_unless_closed),),
        faults=(),
        plan={"exits": True},
    ),
    Defect(
        "keeps a hold whose reply comes with the cancellation",
        "postgres",
        ((AsyncEngine, "call", _call_without_release),),
        (),
        seed=67,
    ),
    Defect(
        "drops a cancelled settlement",
        "redis",
        ((AsyncEngine, "call", _call_unless_cancelled),),
        (),
        0,
        CANCELLED_HOLDS,
    ),
    Defect(
        "takes the end of a session for an outage",
        "postgres",
        ((postgres.PostgresPeer, "may_repeat", _never_repeats),),
        ("terminate",),
        seed=19,
    ),
    Defect(
        "sends two batches whose replies have no order",
        "server",
        ((ServerPeer, "follows", True), (batching, "MOST_PER_BATCH", 2)),
        ("delay",),
    ),
    Defect(
        "takes a blocked event loop for an outage",
        "redis",
        ((batching, "LATE", 1e9), (tasks, "TURNS", 0)),
        ("block",),
        seed=16,
    ),
    Defect(
        "forgets what another tier owes", "redis", ((TokenBucket, "_drained", _drained_if_changed),), seed=8
    ),
    Defect("sends a charge twice", "redis", ((RedisPeer, "may_repeat", _may_always_repeat),), seed=6),
    Defect(
        "sends a charge twice in threads",
        "threads",
        ((RedisPeer, "may_repeat", _may_always_repeat),),
        seed=22,
    ),
    Defect("does not lock in threads", "threads", ((driver, "while_locked", _without_lock),), seed=6),
)
