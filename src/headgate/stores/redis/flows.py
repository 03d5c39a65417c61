"""What each operation asks of the server, and what it makes of the replies: the store without its connections.

Nearly every operation is one request. In a cluster, the states of several rules may lie in several slots, which no single
call can reach. These are charged one slot after the other, token buckets last because of what a refund leaves behind: a
window or a place is afterwards as if nothing had happened, a token bucket only nearly. If a slot refuses or fails, those
before it are refunded. A hold that replaces another one cannot be undone like that, so it must be about a single slot.

A flow is a generator: it yields a request whose keys share a slot, is sent the reply or thrown the error, and returns the
result. So it serves threads and tasks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

from redis.crc import key_slot

from headgate.algorithms import Receipt, TokenBucket
from headgate.clock import Clock
from headgate.costs import Costs
from headgate.decision import Decision, Fields
from headgate.errors import ConfigError, StoreError
from headgate.keys import Key
from headgate.rules import Rule
from headgate.stores.base import RECORDED, Answer, Receipts, given_back
from headgate.stores.redis.codec import Keys, Operation, RedisPlan, Reply, ScriptCall, Tag, plans
from headgate.stores.request import Request

T = TypeVar("T")
Flow = Generator[ScriptCall, Reply, T]

_OPERATIONS = {
    "hit": Operation.HIT,
    "peek": Operation.PEEK,
    "hold": Operation.HOLD,
    "renew": Operation.HIT,  # with the receipts of the leases
}


class Flows:
    """The operations on the states of a limiter's rules."""

    def __init__(
        self, limiter: str, rules: tuple[Rule, ...], namespace: str, tag: Tag | None, clock: Clock | None
    ) -> None:
        self._plans = plans(rules)
        self._keys = Keys(limiter, rules, namespace, tag)
        self._clock = clock
        self.may_spread = tag == "key" and len({rule.scope for rule in rules}) > 1
        """Whether the states of one request may lie in several slots."""

    def question(self, request: Request) -> tuple[ScriptCall, Callable[[Reply], Answer]]:
        """Return the one call for a decision, and what reads its reply; not if it may spread.

        Raises:
            ConfigError: The key does not fit the rules, or the cost is none that they could take.
            CostTooHigh: No waiting would ever admit the cost.
        """
        plan, cost = self._plans.for_request(request), request.cost
        keys, now = self._keys.of(request.key), self._at(request.now)
        call = plan.ask(_OPERATIONS[request.operation], keys, cost, now, request.replaces)
        return call, partial(plan.hold, keys, cost) if request.operation == "hold" else plan.answer

    def ask(self, request: Request) -> Flow[Answer]:
        """Answer a request."""
        if request.operation == "record":
            return (yield from self._record(request))
        if not self.may_spread:
            call, read = self.question(request)
            return read((yield call))
        plan, now = self._plans.for_request(request), self._at(request.now)
        parts = self._parts(plan, self._keys.of(request.key), request.cost)
        if request.operation == "peek":
            return (yield from _peek(plan, parts, now))
        if request.replaces is not None:
            operation = _OPERATIONS[request.operation]
            decision, receipts = yield from _move(plan, parts, operation, request.replaces, now)
        else:
            decision, receipts = yield from _charge(plan, parts, now)
        return decision, receipts if request.operation == "hold" else None

    def _record(self, request: Request) -> Flow[Answer]:
        plan, now = self._plans.for_request(request), self._at(request.now)
        parts = self._parts(plan, self._keys.of(request.key), request.cost)
        for part in filter(_has_cost, parts):
            reply = yield part.plan.ask(Operation.RECORD, part.keys, part.cost, now)
            part.plan.check_recorded(reply, part.cost)
        return RECORDED

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> Flow[None]:
        plan = self._plans.own
        found = tuple(given_back(range(len(receipts)), receipts, cost))
        if not found:
            return
        if len(found) < len(receipts):
            plan = plan.part([i for i, _, _ in found])
        charged, units = tuple(entry for _, entry, _ in found), tuple(units for _, _, units in found)
        keys = tuple(key for key, _ in charged)
        for part in self._parts(plan, keys, units):  # type: ignore[arg-type]  # a receipt of ours has bytes
            own = tuple(charged[i] for i in part.indices)
            yield part.plan.refund(own, part.plan.costs(part.cost), self._at(now))

    def reset(self, key: Key | None) -> Flow[None]:
        for part in self._parts(self._plans.own, self._keys.of(key), 0):
            yield part.plan.reset(part.keys)

    def _at(self, now: int | None) -> int | None:
        """Return the time to decide at; `None` for the server's."""
        return self._clock.now_us() if now is None and self._clock is not None else now

    def _parts(self, plan: RedisPlan, keys: tuple[bytes, ...], cost: Costs) -> list[Part]:
        """Return the parts of a request that lie in one slot each, in the order in which they are to be charged."""
        if not self.may_spread:
            return [Part(range(len(keys)), plan, keys, cost)]
        by_slot: dict[int, list[int]] = {}
        for i, key in enumerate(keys):
            by_slot.setdefault(key_slot(key), []).append(i)
        costs = plan.costs(cost)
        parts = [
            Part(found, plan.part(found), tuple(keys[i] for i in found), tuple(costs[i] for i in found))
            for found in by_slot.values()
        ]
        return sorted(parts, key=_has_buckets)


class Part(NamedTuple):
    """Those rules of a request that lie in one slot, and what it costs them."""

    indices: Sequence[int]
    plan: RedisPlan
    keys: tuple[bytes, ...]
    cost: Costs


def single(request: ScriptCall) -> Flow[Reply]:
    """Return the flow of one request."""
    return (yield request)


def slot_of(request: ScriptCall) -> int:
    """Return the slot of a request."""
    return int(key_slot(request.keys[0]))


def _has_buckets(part: Part) -> bool:
    return any(isinstance(algorithm, TokenBucket) for algorithm in part.plan.algorithms)


def _has_cost(part: Part) -> bool:
    return any(part.plan.costs(part.cost))


def _charge(plan: RedisPlan, parts: list[Part], now: int | None) -> Flow[Answer]:
    """Charge all parts or none."""
    verdicts: dict[int, Fields] = {}
    charged: list[tuple[Part, Receipts]] = []
    try:
        for part in parts:
            reply = yield part.plan.ask(Operation.HOLD, part.keys, part.cost, now)
            found = part.plan.verdicts(reply)
            verdicts.update(zip(part.indices, found, strict=True))
            if not all(verdict[0] for verdict in found):
                break
            if receipts := part.plan.receipts(part.keys, reply, part.cost):
                charged.append((part, receipts))
        else:
            return Decision.make(plan.names, _in_order(verdicts)), _joined(parts, charged)
    except StoreError:
        yield from _undo(charged, now)
        raise
    yield from _undo(charged, now)
    if len(parts) > 1:
        not_asked = [other for other in parts if other.indices[0] not in verdicts]
        yield from _look(not_asked, now, verdicts)
        yield from _look(_free([other for other in parts if other is not part]), now, verdicts)
    return Decision.make(plan.names, _in_order(verdicts)), None


def _move(
    plan: RedisPlan, parts: list[Part], operation: Operation, replaces: Receipts, now: int | None
) -> Flow[Answer]:
    """Charge the one part that a hold is about in place of what it replaces.

    Raises:
        ConfigError: It is about several parts. What was moved in one could not be moved back if another one refused.
    """
    moved = [part for part in parts if _has_cost(part) or any(replaces[i][1] for i in part.indices)]
    if len(moved) > 1:
        raise ConfigError(
            "what this hold has taken lies in several slots of the cluster, and cannot be confirmed or renewed in one step; "
            'use RedisStore(..., hash_tag="limiter"), which keeps a limiter in one slot'
        )
    verdicts: dict[int, Fields] = {}
    charged: list[tuple[Part, Receipts]] = []
    for part in moved:
        own = tuple(replaces[i] for i in part.indices)
        reply = yield part.plan.ask(operation, part.keys, part.cost, now, own)
        verdicts.update(zip(part.indices, part.plan.verdicts(reply), strict=True))
        if receipts := part.plan.receipts(part.keys, reply, part.cost):
            charged.append((part, receipts))
    yield from _look([part for part in parts if part not in moved], now, verdicts)
    return Decision.make(plan.names, _in_order(verdicts)), _joined(parts, charged)


def _peek(plan: RedisPlan, parts: list[Part], now: int | None) -> Flow[Answer]:
    verdicts: dict[int, Fields] = {}
    yield from _look(parts, now, verdicts)
    if len(parts) > 1 and not all(verdict[0] for verdict in verdicts.values()):
        yield from _look(_free(parts), now, verdicts)
    return Decision.make(plan.names, _in_order(verdicts)), None


def _look(parts: Sequence[Part], now: int | None, verdicts: dict[int, Fields]) -> Flow[None]:
    """Note what each rule says without charging it; but one that has refused has refused."""
    for part in parts:
        found = part.plan.verdicts((yield part.plan.ask(Operation.PEEK, part.keys, part.cost, now)))
        for i, verdict in zip(part.indices, found, strict=True):
            if i not in verdicts or verdicts[i][0]:
                verdicts[i] = verdict


def _free(parts: Sequence[Part]) -> list[Part]:
    return [part._replace(cost=0) for part in parts]


def _undo(charged: list[tuple[Part, Receipts]], now: int | None) -> Flow[None]:
    for part, receipts in charged:
        with suppress(StoreError):  # what cannot be given back stays counted until it expires
            yield part.plan.refund(receipts, part.plan.costs(part.cost), now)


def _in_order(verdicts: dict[int, Fields]) -> list[Fields]:
    return [verdicts[i] for i in sorted(verdicts)]


def _joined(parts: list[Part], charged: list[tuple[Part, Receipts]]) -> Receipts | None:
    """Return the receipts of all rules, in their order; those of rules that were not charged are empty."""
    if not charged:
        return None
    by_index: dict[int, tuple[object, Receipt]] = {
        i: (key, ()) for part in parts for i, key in zip(part.indices, part.keys, strict=True)
    }
    for part, receipts in charged:
        by_index.update(zip(part.indices, receipts, strict=True))
    return tuple(by_index[i] for i in sorted(by_index))
