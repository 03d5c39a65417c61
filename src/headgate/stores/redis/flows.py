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
from headgate.decision import Decision, Verdict
from headgate.errors import StoreError
from headgate.keys import Key
from headgate.rules import Rule
from headgate.stores.base import Receipts, check_whole
from headgate.stores.redis.codec import Keys, Operation, Plan, Plans, Reply, Request, Tag

T = TypeVar("T")
Flow = Generator[Request, Reply, T]


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

    def ask(
        self, operation: Operation, key: Key | None, cost: int, tier: str | None, now: int | None
    ) -> tuple[Plan, Request]:
        """Return the request for a decision, and the plan to read its reply with; not if it may spread.

        Raises:
            ConfigError: The key does not fit the rules, or the cost is not a whole number.
            CostTooHigh: No waiting would ever admit the cost.
        """
        plan = self._plans.admitting(tier, cost)
        return plan, plan.ask(operation, self._keys.of(key), cost, self._at(now))

    def hit(self, key: Key | None, cost: int, tier: str | None, now: int | None) -> Flow[Decision]:
        if not self.may_spread:
            plan, request = self.ask(Operation.HIT, key, cost, tier, now)
            return plan.decision((yield request))
        decision, _ = yield from self.hold(key, cost, tier, now)
        return decision

    def peek(self, key: Key | None, cost: int, tier: str | None, now: int | None) -> Flow[Decision]:
        plan = self._plans.admitting(tier, cost)
        return (yield from _peek(plan, self._parts(plan, self._keys.of(key)), cost, self._at(now)))

    def hold(
        self, key: Key | None, cost: int, tier: str | None, now: int | None
    ) -> Flow[tuple[Decision, Receipts | None]]:
        plan = self._plans.admitting(tier, cost)
        return (yield from _charge(plan, self._parts(plan, self._keys.of(key)), cost, self._at(now)))

    def record(self, key: Key | None, cost: int, tier: str | None, now: int | None) -> Flow[None]:
        check_whole(cost)
        plan = self._plans.of(tier)
        parts = self._parts(plan, self._keys.of(key))
        for part in parts if cost else ():
            reply = yield part.plan.ask(Operation.RECORD, part.keys, cost, self._at(now))
            part.plan.check_recorded(reply, cost)

    def refund(self, receipts: Receipts, cost: int, now: int | None) -> Flow[None]:
        keys = tuple(key for key, _ in receipts)
        for part in self._parts(self._plans.of(None), keys):  # type: ignore[arg-type]  # a receipt of ours has bytes
            yield part.plan.refund(tuple(receipts[i] for i in part.indices), cost, self._at(now))

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


class Part(NamedTuple):
    """Those rules of a request that lie in one slot."""

    indices: Sequence[int]
    plan: Plan
    keys: tuple[bytes, ...]


def slot_of(request: Request) -> int:
    """Return the slot of a request."""
    return int(key_slot(request.keys[0]))


def _has_buckets(part: Part) -> bool:
    return any(isinstance(algorithm, TokenBucket) for algorithm in part.plan.algorithms)


def _charge(
    plan: Plan, parts: list[Part], cost: int, now: int | None
) -> Flow[tuple[Decision, Receipts | None]]:
    """Charge all parts or none."""
    verdicts: dict[int, Verdict] = {}
    charged: list[tuple[Part, Receipts]] = []
    try:
        for part in parts:
            reply = yield part.plan.ask(Operation.HOLD, part.keys, cost, now)
            found = part.plan.verdicts(reply)
            verdicts.update(zip(part.indices, found, strict=True))
            if not all(verdict.allowed for verdict in found):
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


def _peek(plan: Plan, parts: list[Part], cost: int, now: int | None) -> Flow[Decision]:
    verdicts: dict[int, Verdict] = {}
    yield from _look(parts, cost, now, verdicts)
    if len(parts) > 1 and not all(verdict.allowed for verdict in verdicts.values()):
        yield from _look(parts, 0, now, verdicts)
    return Decision.make(plan.names, _in_order(verdicts))


def _look(parts: Sequence[Part], cost: int, now: int | None, verdicts: dict[int, Verdict]) -> Flow[None]:
    """Note what each rule says without charging it; but one that has refused has refused."""
    for part in parts:
        found = part.plan.verdicts((yield part.plan.ask(Operation.PEEK, part.keys, cost, now)))
        for i, verdict in zip(part.indices, found, strict=True):
            if i not in verdicts or verdicts[i].allowed:
                verdicts[i] = verdict


def _undo(charged: list[tuple[Part, Receipts]], cost: int, now: int | None) -> Flow[None]:
    for part, receipts in charged:
        with suppress(StoreError):  # what cannot be given back stays counted until it expires
            yield part.plan.refund(receipts, cost, now)


def _in_order(verdicts: dict[int, Verdict]) -> list[Verdict]:
    return [verdicts[i] for i in sorted(verdicts)]


def _joined(charged: list[tuple[Part, Receipts]]) -> Receipts | None:
    by_index = {i: r for part, receipts in charged for i, r in zip(part.indices, receipts, strict=True)}
    return tuple(by_index[i] for i in sorted(by_index)) or None
