"""The counters of the memory store.

`MemoryGate.decide` finds the states of all rules, checks all of them, and charges all or none, under one lock. This file is
also compiled, with the types in `counters.pxd`.

The lock is reentrant, but a call is not: a signal handler, a `__del__` or a weak reference's callback may interrupt a call
on its thread. If it calls the store, the inner call raises an error.

States expire without a thread: every eighth new key checks sixteen old keys and drops expired states. Live keys are never
dropped. If the store is full, new keys of a rule share one overflow state, with the rule's quota, until that state has
expired.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from headgate._checks import refuse_pickling
from headgate.algorithms import Algorithm, Receipt, State
from headgate.clock import Clock, SteadyClock, reading
from headgate.costs import Costs
from headgate.decision import Decision, Fields, RuleFigures, joint_decision, new_decision, new_figures
from headgate.errors import StoreUnavailable
from headgate.keys import SHARED_KEY, Key, PlainKey, key_picker
from headgate.quota import MAX_UNITS
from headgate.rules import SHARED, Rule
from headgate.stores.base import (
    RECORDED,
    REENTERED,
    Answer,
    Gate,
    HeldInForks,
    Receipts,
    Tiers,
    release_if_owned,
    while_locked,
)
from headgate.stores.meters import Meter, MeterState, PenaltyMeter, meter_for
from headgate.stores.penalties import watched_by, with_penalty_costs
from headgate.stores.request import Request

T = TypeVar("T")

NEVER: int = -(2**62)
"""A time that is never reached, as in `meters`."""

SHARDS: int = 64  # a dictionary of a million keys takes 30 ms to grow, a shard takes 0.5 ms
LAST_SHARD: int = SHARDS - 1
NEW_KEYS_PER_CHECK: int = 8  # in plain Python, starting a check takes as long as checking a key
CHECKED_FOR_NEW_KEYS: int = 2 * NEW_KEYS_PER_CHECK
CHECKED_WHEN_FULL: int = 32
GRACE_US: int = 3_600_000_000  # additional lifetime of a state that was written with an explicit `now=`


class _Overflow:
    """The key of the overflow state; different from every key of a caller."""

    def __repr__(self) -> str:
        return "<overflow>"


OVERFLOW = _Overflow()
"""The key in a receipt of units in the overflow state."""


class Counters:
    """All states of a memory store, and their lock.

    Attributes:
        lock: Held during every call.
        keys: Number of states.
        max_keys: Maximum number of states.
        overflowed: Number of calls that were counted in an overflow state.
        births: The last birth of a state.
    """

    def __init__(self, clock: Clock, max_keys: int) -> None:
        self.clock = clock
        # The default clock is read directly, for speed.
        self.is_usual: bool = type(clock) is SteadyClock and clock.is_of_system
        self.epoch_us: int = clock.epoch_us if isinstance(clock, SteadyClock) else 0
        self.max_keys: int = max_keys
        self.keys: int = 0
        self.overflowed: int = 0
        self.tables: dict[tuple[str, str], Table] = {}
        self.lock: Any = threading.RLock()
        self.births: int = random.SystemRandom().randrange(1, MAX_UNITS)

    def after_fork_in_child(self, forks: HeldInForks) -> None:
        """Choose new births, because parent and child would otherwise produce the same ones."""
        self.births = random.SystemRandom().randrange(1, MAX_UNITS)
        self.lock = forks.after_in_child(self.lock)

    def now(self) -> int:
        """Return the time in microseconds since the epoch."""
        return time.monotonic_ns() // 1000 + self.epoch_us if self.is_usual else reading(self.clock)

    def table(self, limiter: str, rule: Rule, meter: Meter) -> Table:
        """Return the states of a limiter's rule."""
        place = limiter, rule.identity
        return self.tables.get(place) or self.tables.setdefault(place, Table(self, meter))

    def make_room(self) -> None:
        """Drop a few expired states if the store is full."""
        if self.keys >= self.max_keys:
            for table in list(self.tables.values()):  # another thread may bind rules at any time
                table.drop_expired(CHECKED_WHEN_FULL, self.now())

    def alone(self, work: Callable[..., T], *args: Any) -> T:
        """Return the result of a function that runs exclusively."""
        return while_locked(self.lock, work, *args)

    def states(self) -> dict[tuple[tuple[str, str], object], State]:
        """Return all states in the form of the pure functions, by limiter and rule, and key."""
        return {
            (place, key): state
            for place, table in list(self.tables.items())
            for key, state in table.states()
            if state is not None
        }

    def clear(self) -> None:
        """Delete all states."""
        for table in list(self.tables.values()):
            table.clear()
        self.keys = 0


class Table:
    """The states of one rule by key. The caller holds the store's lock.

    Every key is exactly once in the queue of keys to check; only `drop_expired` removes it.
    """

    def __init__(self, counters: Counters, meter: Meter) -> None:
        self.counters: Counters = counters
        self.meter: Meter = meter
        self.blank: MeterState = self.meter.new()
        """The state for decisions about new keys; it is never charged."""
        self.clear()

    def clear(self) -> None:
        """Delete all states; the caller sets the number of keys of the counters."""
        self.shards: list[dict[PlainKey, MeterState]] = [{} for _ in range(SHARDS)]
        self.queue: deque[PlainKey] = deque()
        self.overflow: MeterState = self.meter.new()
        # Expiry, by the store's clock, of states that were written with an explicit time. That time may be on another
        # scale, so the expiry cannot be computed from the state.
        self.kept: dict[MeterState, int] = {}

    def states(self) -> list[tuple[object, State | None]]:
        """Return all keys and states in the form of the pure functions."""
        found: list[tuple[object, MeterState]] = [(OVERFLOW, self.overflow)]
        for shard in self.shards:
            found += shard.items()
        return [(key, self.meter.as_tuple(state)) for key, state in found]

    def get(self, key: PlainKey) -> MeterState | None:
        """Return the state of a key, or `None` for a new key."""
        shard = self.shards[hash(key) & LAST_SHARD]
        return shard.get(key)

    def find(self, place: object) -> MeterState | None:
        """Return the state that a receipt refers to."""
        return self.overflow if place is OVERFLOW else self.get(place)  # type: ignore[arg-type]  # a receipt of ours

    def state_of_new_key(self, now: int, has_room: bool) -> MeterState:
        """Return the state for decisions about a new key: the blank or the overflow state."""
        return self.blank if has_room and self.meter.fresh_at(self.overflow) <= now else self.overflow

    def add(self, key: PlainKey, now: int) -> MeterState:
        """Add a state for a key, at a time of the store's clock."""
        if not len(self.queue) % NEW_KEYS_PER_CHECK:
            self.drop_expired(CHECKED_FOR_NEW_KEYS, now)
        state = self.meter.new()
        shard = self.shards[hash(key) & LAST_SHARD]
        shard[key] = state
        self.counters.keys += 1
        self.queue.append(key)
        return state

    def drop_expired(self, most: int, now: int) -> None:
        """Check the next keys, at most `most`, and drop expired states."""
        queue, shards, meter, kept = self.queue, self.shards, self.meter, self.kept
        for _ in range(min(most, len(queue))):
            key = queue[0]
            shard = shards[hash(key) & LAST_SHARD]
            state = shard.get(key)
            if state is not None:  # None if a signal handler raised after `del` below
                until = kept.get(state) if kept and state.birth else None
                if (meter.fresh_at(state) if until is None else until) > now:
                    queue.rotate(-1)
                    continue
                if kept:
                    kept.pop(state, None)
                del shard[key]
                self.counters.keys -= 1
            queue.popleft()

    def set_expiry(self, state: MeterState, explicit_now: int | None) -> None:
        """Store the expiry of a state that was written with an explicit time."""
        if explicit_now is not None:
            left = self.meter.fresh_at(state) - explicit_now
            self.kept[state] = self.counters.now() + (max(0, left)) + GRACE_US
        elif self.kept:
            self.kept.pop(state, None)


class Slot:
    """One rule of a gate in one tier, with variables of the current call.

    A gate creates its slots once. Calls can share them, because they use them while they hold the store's lock.
    """

    __slots__ = (
        *("cost", "empty_at", "is_free", "key", "meter", "place"),
        *("remaining", "reset_after", "retry_after", "state", "table", "used"),
    )

    def __init__(self, place: int, meter: Meter, table: Table) -> None:
        self.place: int = place
        """Index of the rule in the gate."""
        self.meter: Meter = meter
        self.table: Table = table
        self.state: MeterState = table.blank
        self.key: PlainKey = ""
        self.cost: int = 0
        self.used: int = 0
        self.empty_at: int = NEVER
        """Time at which the count will be 0; set by a charge."""
        self.is_free: bool = True
        self.remaining: int = 0
        self.retry_after: int = NEVER
        self.reset_after: int = NEVER

    def judge(self, at: int, admitted: bool, charged: bool) -> None:
        """Set the verdict of this rule.

        `admitted`: whether all rules admit the units; `charged`: whether they were charged already.
        """
        meter, cost, used = self.meter, self.cost, self.used
        self.is_free = True
        self.retry_after = NEVER
        if not admitted:
            excess = used + cost * meter.part - meter.most
            if cost and excess > 0:
                self.is_free = False
                free_at = meter.free_at(self.state, at, excess)
                self.retry_after = NEVER if free_at == NEVER else free_at - at
            cost = 0
        empty_at = self.empty_at if charged and cost else meter.empty_at(self.state, at, used, cost)
        self.reset_after = NEVER if empty_at == NEVER else empty_at - at
        self.remaining = max(0, (meter.most - used) // meter.part - cost)

    def figures(self) -> RuleFigures:
        """Return the verdict."""
        return new_figures(self.is_free, self.meter.limit, self.remaining, self.retry_after, self.reset_after)


class MemoryGate:
    """A limiter's rules over the tables of a memory store."""

    def __init__(self, counters: Counters, limiter: str, rules: tuple[Rule, ...]) -> None:
        self.counters: Counters = counters
        self.limiter = limiter
        self.rules = rules
        self.names: tuple[str, ...] = tuple([rule.name for rule in rules])
        scopes = [rule.scope for rule in rules]
        self.is_plain: bool = all(scope is None for scope in scopes)
        self.scopes: tuple[str | None, ...] = tuple([None if scope == SHARED else scope for scope in scopes])
        """The scope of each rule; `None` for the shared key."""
        self.named: int = -1 if None in scopes else len(set(self.scopes) - {None})
        """Number of entries of a mapping as key; negative if keys are not mappings."""
        self.pick: Callable[[Key | None], tuple[PlainKey, ...]] = key_picker(rules)
        self.tiers: Tiers[tuple[Slot, ...]] = Tiers(rules, self.make_slots)
        self.own: tuple[Slot, ...] = self.tiers.own
        self.by_tier: dict[str, tuple[Slot, ...]] = self.tiers.by_tier
        self.always_fits: int = self.tiers.always_fits
        """A cost up to this one needs no further check."""

    def __reduce__(self) -> NoReturn:
        refuse_pickling(self)

    def make_slots(self, algorithms: tuple[Algorithm, ...]) -> tuple[Slot, ...]:
        """Return the slots of all rules with the quotas of one tier."""
        meters = [meter_for(algorithm) for algorithm in algorithms]
        tables = [
            self.counters.table(self.limiter, rule, meter)
            for rule, meter in zip(self.rules, meters, strict=True)
        ]
        return tuple([Slot(place, meters[place], table) for place, table in enumerate(tables)])

    def decide(self, request: Request) -> Answer:
        """Decide a request: find the states of all rules, check all of them, and charge all or none."""
        key, cost, tier = request.key, request.cost, request.tier
        if type(cost) is int and 0 <= cost <= self.always_fits:
            units = cost
            slots = self.own if tier is None else self.by_tier.get(tier, self.own)
        else:
            slots = self.tiers.for_request(request)  # refuses a cost that is too large for the units
            units = cost if type(cost) is int else -1
        keys = None if self.is_plain and type(key) is str else self.keys_of(key)
        lock = self.counters.lock  # a local variable, because a fork during the call replaces the lock
        if lock._is_owned():
            raise StoreUnavailable(REENTERED)
        try:  # like `while_locked`, but without its call
            lock.acquire()
            answer = self.decide_alone(request, slots, keys, units)
            lock.release()
        except BaseException:
            release_if_owned(lock)
            raise
        return answer

    def decide_alone(
        self, request: Request, slots: tuple[Slot, ...], keys: tuple[PlainKey, ...] | None, units: int
    ) -> Answer:
        """Decide a request while the lock is held.

        Without `keys`, all rules have the key of the request; if `units` is negative, the request has a cost per rule. This
        is one function, because in plain Python every further call takes 2 % of the time.
        """
        operation, now, counters = request.operation, request.now, self.counters
        key, has_new, admitted = request.key, False, True
        at = counters.now() if now is None else now
        for slot in slots:
            if keys is not None:
                key = keys[slot.place]
            slot.key = key  # type: ignore[assignment]  # a plain key
            slot.cost = units if units >= 0 else request.cost[slot.place]
            meter, table = slot.meter, slot.table
            shard = table.shards[hash(key) & LAST_SHARD]
            state = shard.get(key)  # type: ignore[arg-type]
            if state is None:
                has_new, used = True, 0
                state = table.blank
            else:
                used = meter.used(state, at)
            slot.state = state
            slot.used = used
            if slot.cost and used + slot.cost * meter.part > meter.most:
                admitted = False
        if has_new and (counters.overflowed or counters.max_keys - counters.keys < len(slots)):
            admitted = self.find_room(slots, at)
        if request.replaces is not None:
            return self.move(request, slots, at)
        holds, charged = False, admitted
        if operation != "hit":  # first, because it is the most frequent
            if operation == "peek":
                charged = False
            elif operation == "record":
                self.record(slots, at, now)
                return RECORDED
            else:
                holds = True
        receipts = self.charge(slots, at, now, holds) if charged else None
        for slot in slots:
            slot.judge(at, admitted, charged)
        return self.decision(request, slots, at), receipts

    def decision(self, request: Request, slots: tuple[Slot, ...], at: int) -> Decision:
        """Return the joint decision of all rules.

        If another rule refuses, the figures of an admitting rule are those without this call.
        """
        if len(slots) > 1:
            return joint_decision(self.names, tuple([slot.figures() for slot in slots]))
        slot = slots[0]
        return new_decision(
            self.names, slot.is_free, slot.meter.limit, slot.remaining, slot.retry_after, slot.reset_after
        )

    def keys_of(self, key: Key | None) -> tuple[PlainKey, ...]:
        """Return the key of each rule: a fast path for mappings of text, else `pick`."""
        if type(key) is not dict or len(key) != self.named:
            return self.pick(key)
        parts: dict[Any, Any] = key
        keys: list[PlainKey] = []
        for scope in self.scopes:
            part = SHARED_KEY if scope is None else parts.get(scope)
            if type(part) is not str:
                return self.pick(key)
            keys.append(part)
        return tuple(keys)

    def find_room(self, slots: tuple[Slot, ...], at: int) -> bool:
        """Use overflow states for new keys, if the store is full or overflow states have not expired yet.

        Return whether all rules admit.
        """
        counters = self.counters
        counters.make_room()  # it may drop states that were found before
        room = counters.max_keys - counters.keys
        overflowed, admitted = False, True
        for slot in slots:
            state = slot.table.get(slot.key)
            if state is None:
                state = slot.table.state_of_new_key(at, room > 0)
                if state is slot.table.blank:
                    room -= 1
                else:
                    overflowed = True
            slot.state = state
            slot.used = slot.meter.used(state, at)
            if slot.cost and slot.used + slot.cost * slot.meter.part > slot.meter.most:
                admitted = False
        if overflowed:
            counters.overflowed += 1
        return admitted

    def charge(self, slots: tuple[Slot, ...], at: int, now: int | None, holds: bool) -> Receipts | None:
        """Charge every rule; return receipts if it is a hold and any rule was charged.

        A signal handler that raises here may leave some rules charged.
        """
        receipts: list[tuple[object, Receipt]] | None = [] if holds else None
        counters, charged = self.counters, False
        for slot in slots:
            meter, table, state, cost = slot.meter, slot.table, slot.state, slot.cost
            if not cost:
                if receipts is not None:
                    receipts.append((slot.key, ()))
                continue
            charged = True
            birth = counters.births + 1
            counters.births = birth
            if receipts is not None:
                receipt = meter.receipt(state, at, slot.used, cost, birth)
                receipts.append((OVERFLOW if state is table.overflow else slot.key, receipt))
            if state is table.blank:
                state = table.add(slot.key, counters.now() if now is not None else at)
                slot.state = state
            slot.empty_at = meter.charge(state, at, slot.used, cost, birth)
            if now is not None or table.kept:
                table.set_expiry(state, now)
        return tuple(receipts) if receipts is not None and charged else None

    def record(self, slots: tuple[Slot, ...], at: int, now: int | None) -> None:
        """Count used units, even beyond the limits."""
        for slot in slots:
            if slot.cost:
                slot.meter.check_countable(slot.used, slot.cost)
        self.charge(slots, at, now, False)

    def move(self, request: Request, slots: tuple[Slot, ...], at: int) -> Answer:
        """Replace the units of a hold, or renew its leases."""
        replaced: Receipts = request.replaces  # type: ignore[assignment]  # not None here
        receipts: list[Receipt] = []
        for slot in slots:
            place, receipt = replaced[slot.place]
            if receipt and place != (OVERFLOW if slot.state is slot.table.overflow else slot.key):
                # Charged in another state, because the store was or is full: renew leases there, leave units.
                if request.operation == "renew":
                    slot.state = slot.table.find(place) or slot.table.blank
                else:
                    receipt = ()
            receipts.append(receipt)
        verdicts = [
            slot.meter.decide_move(slot.state, receipt, at, slot.cost) if receipt else None
            for slot, receipt in zip(slots, receipts, strict=True)
        ]
        admitted = True
        for slot, verdict in zip(slots, verdicts, strict=True):
            if verdict is None:
                is_free = not slot.cost or slot.used + slot.cost * slot.meter.part <= slot.meter.most
            else:
                is_free = verdict.allowed
            admitted = admitted and is_free
        fields: list[Fields] = []
        for slot, verdict in zip(slots, verdicts, strict=True):
            if verdict is not None and (admitted or not verdict.allowed):
                fields.append(verdict)
                continue
            if verdict is not None:  # another rule refuses: show the figures without this call
                slot.cost = 0
                slot.used = slot.meter.used(slot.state, at)
            slot.judge(at, admitted, False)
            fields.append(slot.figures().fields())
        decision = Decision.make(self.names, fields)
        if not admitted:
            return decision, None
        taken = self.move_each(slots, receipts, at, request.now)
        return decision, taken if request.operation == "hold" else None

    def move_each(
        self, slots: tuple[Slot, ...], receipts: list[Receipt], at: int, now: int | None
    ) -> Receipts:
        """Replace the receipt of every rule by a new charge, and return the new receipts."""
        taken: list[tuple[object, Receipt]] = []
        counters = self.counters
        for slot in slots:
            receipt, state, table = receipts[slot.place], slot.state, slot.table
            place = OVERFLOW if state is table.overflow else slot.key
            if not slot.cost and (not receipt or state is table.blank):
                taken.append((place, ()))
                continue
            birth = counters.births + 1
            counters.births = birth
            if state is table.blank:
                state = table.add(slot.key, counters.now())
            if receipt:
                receipt = slot.meter.move(state, receipt, at, slot.cost, birth)
            else:
                receipt = slot.meter.receipt(state, at, slot.used, slot.cost, birth)
                slot.meter.charge(state, at, slot.used, slot.cost, birth)
            table.set_expiry(state, now)
            taken.append((place, receipt))
        return tuple(taken)

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        """Give back units of a hold, as far as they still count."""
        self.counters.alone(self.refund_alone, receipts, cost, now)

    def refund_alone(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        at = self.counters.now() if now is None else now
        for slot in self.own:
            place, receipt = receipts[slot.place]
            units = cost if type(cost) is int else cost[slot.place]  # type: ignore[index]
            state = slot.table.find(place) if receipt and units else None
            if state is not None:
                slot.meter.refund(state, receipt, units, at)
                if now is not None or slot.table.kept:
                    slot.table.set_expiry(state, now)

    def reset(self, key: Key | None) -> None:
        """Delete the counts of a key."""
        self.counters.alone(self.reset_alone, self.keys_of(key))

    def reset_alone(self, keys: tuple[PlainKey, ...]) -> None:
        for slot in self.own:
            state = slot.table.get(keys[slot.place])
            if state is not None:
                slot.meter.clear(state)


class PenaltyGate(MemoryGate):
    """A gate with penalties among its rules."""

    def __init__(self, counters: Counters, limiter: str, rules: tuple[Rule, ...]) -> None:
        super().__init__(counters, limiter, rules)
        self.watched: dict[int, tuple[int, ...]] = watched_by(rules)
        """By the index of each penalty, the rules whose refusals it counts."""

    def decide(self, request: Request) -> Answer:
        return MemoryGate.decide(self, with_penalty_costs(self.rules, request))

    def decision(self, request: Request, slots: tuple[Slot, ...], at: int) -> Decision:
        if request.is_punishable:
            for place, watched in self.watched.items():
                slot = slots[place]
                if slot.is_free and self.is_refused_by(slots, watched):
                    self.count_refusal(slot, at, request.now)
        return MemoryGate.decision(self, request, slots, at)

    def find_room(self, slots: tuple[Slot, ...], at: int) -> bool:
        """Find the states of the other rules; a penalty never uses an overflow state, and needs room only for a refusal."""
        others = tuple([slot for slot in slots if slot.place not in self.watched])
        admitted = MemoryGate.find_room(self, others, at)
        for place in self.watched:
            slot = slots[place]
            state = slot.table.get(slot.key)
            slot.state = slot.table.blank if state is None else state
            slot.used = slot.meter.used(slot.state, at)
            if slot.cost and slot.used + slot.cost * slot.meter.part > slot.meter.most:
                admitted = False
        return admitted

    def is_refused_by(self, slots: tuple[Slot, ...], places: tuple[int, ...]) -> bool:
        """Return whether one of these rules refused.

        Refusals by a limit of 0, which are permanent, do not count, nor refusals by an overflow state, which other
        callers may have used up.
        """
        for place in places:
            slot = slots[place]
            if not slot.is_free and slot.retry_after != NEVER and slot.state is not slot.table.overflow:
                return True
        return False

    def count_refusal(self, slot: Slot, at: int, now: int | None) -> None:
        """Count a refusal in a penalty, if it has a state or there is room for one."""
        table, counters, state = slot.table, self.counters, slot.state
        if state is table.blank:
            if counters.keys >= counters.max_keys:
                return
            state = table.add(slot.key, counters.now() if now is not None else at)
            slot.state = state
        birth = counters.births + 1
        counters.births = birth
        meter: PenaltyMeter = slot.meter  # type: ignore[assignment]  # the meter of a penalty
        meter.count(state, at, birth)
        if now is not None or table.kept:
            table.set_expiry(state, now)
        slot.used = meter.used(state, at)
        slot.judge(at, False, False)

    def charge(self, slots: tuple[Slot, ...], at: int, now: int | None, holds: bool) -> Receipts | None:
        """Charge the other rules."""
        others: list[Slot] = []
        for slot in slots:
            if slot.place in self.watched:
                slot.empty_at = slot.meter.empty_at(slot.state, at, slot.used, 0)
            else:
                others.append(slot)
        taken = MemoryGate.charge(self, tuple(others), at, now, holds)
        if taken is None:
            return None
        receipts = list(taken)
        for place in self.watched:  # in ascending order
            slot = slots[place]
            receipts.insert(place, (slot.key, ()))
        return tuple(receipts)


class ImmediateGate:
    """A gate that never waits, for coroutines."""

    def __init__(self, gate: Gate) -> None:
        self.gate: Gate = gate

    async def decide(self, request: Request) -> Answer:
        """See `Gate.decide`."""
        return self.gate.decide(request)

    async def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        """See `Gate.refund`."""
        self.gate.refund(receipts, cost, now)

    async def reset(self, key: Key | None) -> None:
        """See `Gate.reset`."""
        self.gate.reset(key)

    def __reduce__(self) -> NoReturn:
        refuse_pickling(self)
