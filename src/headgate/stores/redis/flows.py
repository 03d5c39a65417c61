"""What each operation asks of the server, and what it makes of the replies: the store without its connections.

Nearly every operation is one request. In a cluster, the states of several rules may lie in several slots, which no single
call can reach. These are charged one slot after the other, token buckets last because of what a refund leaves behind: a
window is afterwards as if nothing had happened, a token bucket only nearly. If a slot refuses or fails, those before it are
refunded.

A flow is a generator: it yields a request whose keys share a slot, is sent the reply or thrown the error, and returns the
result. So it serves threads and tasks alike.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

from redis.crc import key_slot

from headgate.algorithms import TokenBucket
from headgate.clock import Clock
from headgate.costs import Costs
from headgate.decision import Decision, Fields
from headgate.errors import StoreError
from headgate.keys import Key
from headgate.rules import Rule
from headgate.stores.base import RECORDED, Answer, Receipts, check_whole, plain_cost
from headgate.stores.redis.codec import Keys, Operation, Plan, Plans, Reply, ScriptCall, Tag
from headgate.stores.request import Request

T = TypeVar("T")
Flow = Generator[ScriptCall, Reply, T]

_OPERATIONS = {"hit": Operation.HIT, "peek": Operation.PEEK, "hold": Operation.HOLD}


class Flows:
    """The operations on the states of a limiter's rules."""

    def __init__(
        self, limiter: str, rules: tuple[Rule, ...], namespace: str, tag: Tag | None, clock: Clock | None
    ) -> None:
        self._plans = Plans(rules)
        self._keys = Keys(limiter, rules, namespace, tag)
        self._clock = clock
        self.may_spread = tag == "key" and len({rule.scope for rule in rules}) > 1
        """Whether the states of one request may lie in several slots."""

    def question(self, request: Request) -> Question:
        """Return the one call for a decision, and how its reply is read; not if it may spread.

        Raises:
            ConfigError: The key does not fit the rules, or the cost is not a whole number.
            CostTooHigh: No waiting would ever admit the cost.
        """
        plan = self._plans.admitting(request.tier, request.cost)
        operation = _OPERATIONS[request.operation]
        call = plan.ask(operation, self._keys.of(request.key), request.cost, self._at(request.now))
        return Question(plan, call, request.cost, operation == Operation.HOLD)

    def ask(self, request: Request) -> Flow[Answer]:
        """Answer a request."""
        if request.operation == "record":
            return (yield from self._record(request))
        if not self.may_spread:
            question = self.question(request)
            return question.answer((yield question.call))
        plan = self._plans.admitting(request.tier, request.cost)
        parts = self._parts(plan, self._keys.of(request.key))
        if request.operation == "peek":
            return (yield from _peek(plan, parts, request.cost, self._at(request.now)))
        decision, receipts = yield from _charge(plan, parts, request.cost, self._at(request.now))
        return decision, receipts if request.operation == "hold" else None

    def _record(self, request: Request) -> Flow[Answer]:
        check_whole(request.cost)
        plan = self._plans.of(request.tier)
        parts = self._parts(plan, self._keys.of(request.key))
        for part in parts if request.cost else ():
            reply = yield part.plan.ask(Operation.RECORD, part.keys, request.cost, self._at(request.now))
            part.plan.check_recorded(reply, request.cost)
        return RECORDED

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> Flow[None]:
        keys = tuple(key for key, _ in receipts)
        for part in self._parts(self._plans.of(None), keys):  # type: ignore[arg-type]  # a receipt of ours has bytes
            yield part.plan.refund(tuple(receipts[i] for i in part.indices), plain_cost(cost), self._at(now))

    def reset(self, key: Key | None) -> Flow[None]:
        for part in self._parts(self._plans.of(None), self._keys.of(key)):
            yield part.plan.reset(part.keys)

    def _at(self, now: int | None) -> int | None:
        """Return the time to decide at; `None` for the server's."""
        return self._clock.now_us() if now is None and self._clock is not None else now

    def _parts(self, plan: Plan, keys: tuple[bytes, ...]) -> list[Part]:
        """Return the parts of a request that lie in one slot each, in the order in which they are to be charged."""
        if not self.may_spread:
            return [Part(range(len(keys)), plan, keys)]
        by_slot: dict[int, list[int]] = {}
        for i, key in enumerate(keys):
            by_slot.setdefault(key_slot(key), []).append(i)
        parts = [Part(found, plan.part(found), tuple(keys[i] for i in found)) for found in by_slot.values()]
        return sorted(parts, key=_has_buckets)


class Question(NamedTuple):
    """A decision that takes a single call."""

    plan: Plan
    call: ScriptCall
    cost: int
    holds: bool

    def answer(self, reply: Reply) -> Answer:
        """Return what a reply says."""
        receipts = self.plan.receipts(self.call.keys, reply, self.cost) if self.holds else None
        return self.plan.decision(reply), receipts


class Part(NamedTuple):
    """Those rules of a request that lie in one slot."""

    indices: Sequence[int]
    plan: Plan
    keys: tuple[bytes, ...]


def single(request: ScriptCall) -> Flow[Reply]:
    """Return the flow of one request."""
    return (yield request)


def slot_of(request: ScriptCall) -> int:
    """Return the slot of a request."""
    return int(key_slot(request.keys[0]))


def _has_buckets(part: Part) -> bool:
    return any(isinstance(algorithm, TokenBucket) for algorithm in part.plan.algorithms)


def _charge(plan: Plan, parts: list[Part], cost: int, now: int | None) -> Flow[Answer]:
    """Charge all parts or none."""
    verdicts: dict[int, Fields] = {}
    charged: list[tuple[Part, Receipts]] = []
    try:
        for part in parts:
            reply = yield part.plan.ask(Operation.HOLD, part.keys, cost, now)
            found = part.plan.verdicts(reply)
            verdicts.update(zip(part.indices, found, strict=True))
            if not all(verdict[0] for verdict in found):
                break
            if receipts := part.plan.receipts(part.keys, reply, cost):
                charged.append((part, receipts))
        else:
            return Decision.make(plan.names, _in_order(verdicts)), _joined(charged)
    except StoreError:
        yield from _undo(charged, cost, now)
        raise
    yield from _undo(charged, cost, now)
    if len(parts) > 1:
        not_asked = [other for other in parts if other.indices[0] not in verdicts]
        yield from _look(not_asked, cost, now, verdicts)
        yield from _look([other for other in parts if other is not part], 0, now, verdicts)
    return Decision.make(plan.names, _in_order(verdicts)), None


def _peek(plan: Plan, parts: list[Part], cost: int, now: int | None) -> Flow[Answer]:
    verdicts: dict[int, Fields] = {}
    yield from _look(parts, cost, now, verdicts)
    if len(parts) > 1 and not all(verdict[0] for verdict in verdicts.values()):
        yield from _look(parts, 0, now, verdicts)
    return Decision.make(plan.names, _in_order(verdicts)), None


def _look(parts: Sequence[Part], cost: int, now: int | None, verdicts: dict[int, Fields]) -> Flow[None]:
    """Note what each rule says without charging it; but one that has refused has refused."""
    for part in parts:
        found = part.plan.verdicts((yield part.plan.ask(Operation.PEEK, part.keys, cost, now)))
        for i, verdict in zip(part.indices, found, strict=True):
            if i not in verdicts or verdicts[i][0]:
                verdicts[i] = verdict


def _undo(charged: list[tuple[Part, Receipts]], cost: int, now: int | None) -> Flow[None]:
    for part, receipts in charged:
        with suppress(StoreError):  # what cannot be given back stays counted until it expires
            yield part.plan.refund(receipts, cost, now)


def _in_order(verdicts: dict[int, Fields]) -> list[Fields]:
    return [verdicts[i] for i in sorted(verdicts)]


def _joined(charged: list[tuple[Part, Receipts]]) -> Receipts | None:
    by_index = {i: r for part, receipts in charged for i, r in zip(part.indices, receipts, strict=True)}
    return tuple(by_index[i] for i in sorted(by_index)) or None
