"""Defects that were put back on purpose, to see that the simulator finds them.

The first three are the bugs of the fault runner (`tests/faults/broken.py`). The others were in the code once, and are named
in CHANGELOG.md or docs/proof.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, NamedTuple
from unittest.mock import patch

from psycopg import OperationalError

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

FORGETS_ONE_IN = 100
LEAKS_ONE_IN = 20
FAILS_OPEN_ONE_IN = 300


class Defect(NamedTuple):
    """A defect.

    Attributes:
        name: A short description.
        store: The store that it shows on.
        seeds: The number of seeds, from 0 on, among which it is found.
        replaced: The patches: object, attribute and new value.
        faults: The faults of the runs; random ones by default.
        first: The first seed that is run; those before it take long and find nothing.
    """

    name: str
    store: str
    seeds: int
    replaced: tuple[tuple[Any, str, Any], ...]
    faults: tuple[str, ...] | None = None
    first: int = 0


@contextmanager
def put_back(defect: Defect) -> Iterator[None]:
    """Patch a defect in for the length of a block."""
    with ExitStack() as stack:
        for target, name, value in defect.replaced:
            stack.enter_context(patch.object(target, name, value))
        yield


_decide = AsyncRemoteGate.decide
_release_request = gates.release_request
_drained = TokenBucket._drained


def _forgets() -> Callable[..., Any]:
    numbers = count(1)

    async def decide(self: Any, request: Request) -> Any:
        if request.operation == "hit" and next(numbers) % FORGETS_ONE_IN == 0:
            request = Request("peek", request.key, request.cost, request.tier, request.now, request.quotas)
        return await _decide(self, request)

    return decide


def _fails_open() -> Callable[..., Any]:
    numbers = count(1)

    async def decide(self: Any, request: Request) -> Any:
        decision, receipts = await _decide(self, request)
        if request.operation == "hit" and not decision and next(numbers) % FAILS_OPEN_ONE_IN == 0:
            admitted = [(True, limit, left, None, reset) for _, limit, left, _, reset in decision.fields]
            return Decision.make(decision.names, admitted), None
        return decision, receipts

    return decide


def _leaks() -> Callable[..., Any]:
    numbers = count(1)

    def release_request(*arguments: Any) -> Any:
        return None if next(numbers) % LEAKS_ONE_IN == 0 else _release_request(*arguments)

    return release_request


async def _renew_with_new_lease(self: Any, *, now: float | None = None) -> Decision:
    """Take new places, then give the old ones back; a caller that is cancelled in between never learns of the new ones."""
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
    """Fail what follows on the connection as if the server were away."""
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


async def _call_unless_cancelled(self: Any, encoded: Any, must_send: bool, abandoned: Any = None) -> Any:
    return await _call(self, encoded, False, abandoned)


_call = AsyncRemoteGate._call


def _drained_if_changed(self: Any, state: Any, now: int, birth: int) -> Any:
    """Drop the units taken in another tier."""
    if state is not None and state[4:] != (self.n, self.d, self.burst):
        state = None
    return _drained(self, state, now, birth)


def may_always_repeat(self: Any, request: Any, cause: BaseException) -> bool:
    return isinstance(cause, ConnectionResetError)


def _never_repeats(self: Any, request: Any, cause: BaseException) -> bool:
    return False


def defects() -> list[Defect]:
    """Return all defects, with fresh counters."""
    return [
        Defect("forgets one charge in 100", "redis", 400, ((AsyncRemoteGate, "decide", _forgets()),), ()),
        Defect(
            "fails open once in 300 refusals", "redis", 400, ((AsyncRemoteGate, "decide", _fails_open()),), ()
        ),
        Defect(
            "leaks one cancelled hold in 20", "redis", 400, ((gates, "release_request", _leaks()),), (), 40
        ),
        Defect(
            "renews with a new lease",
            "redis",
            200,
            ((AsyncHold, "renew", _renew_with_new_lease),),
            (),
        ),
        Defect(
            "takes a replica for an outage",
            "redis",
            200,
            ((RedisPeer, "_answer", _answer_replica_as_reset),),
            ("demote",),
        ),
        Defect(
            "loses replies with the end of a connection",
            "postgres",
            200,
            ((postgres.PostgresWire, "receive", _receive_late), (batching, "ENOUGH_TO_FOLLOW", 2)),
            ("restart", "block"),
        ),
        Defect(
            "loses refunds on close", "redis", 200, ((AsyncEngine, "_start", _start_unless_closed),), None, 75
        ),
        Defect(
            "keeps a hold whose reply comes with the cancellation",
            "postgres",
            200,
            ((AsyncEngine, "call", _call_without_release),),
            (),
        ),
        Defect(
            "drops a cancelled settlement",
            "redis",
            200,
            ((AsyncRemoteGate, "_call", _call_unless_cancelled),),
        ),
        Defect(
            "takes the end of a session for an outage",
            "postgres",
            200,
            ((postgres.PostgresPeer, "may_repeat", _never_repeats),),
            ("terminate",),
        ),
        Defect(
            "sends two batches whose replies have no order",
            "server",
            200,
            ((ServerPeer, "follows", True), (batching, "ENOUGH_TO_FOLLOW", 2)),
            ("delay",),
        ),
        Defect(
            "takes a blocked event loop for an outage",
            "redis",
            100,
            ((batching, "LATE", 1e9), (tasks, "TURNS", 0)),
            ("block",),
        ),
        Defect(
            "forgets what another tier owes", "redis", 200, ((TokenBucket, "_drained", _drained_if_changed),)
        ),
        Defect("sends a charge twice", "redis", 200, ((RedisPeer, "may_repeat", may_always_repeat),)),
    ]
