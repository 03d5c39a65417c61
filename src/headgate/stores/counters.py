"""The memory store's counters: one path from a request to its answer.

`MemoryGate.ask` finds the states of all rules, asks all of them, and charges all or none, under one lock. This file is also
compiled, with the types in `counters.pxd`.

The lock is reentrant, but a call is not: a signal handler, a `__del__` or a weak reference's callback may run in the middle
of a call, on its thread, and what it asks then is refused at once (`Counters.busy`) instead of being counted between two
steps.

Expiry has no thread: every eighth new key looks at sixteen old ones and drops those whose state equals a fresh one. A live
key is never dropped to make room. When the store is full, new keys share one overflow state, with the rule's quota, until
nothing is counted there any more.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from headgate._checks import refuse_pickling
from headgate.algorithms import Algorithm, Receipt, State
from headgate.clock import Clock, SteadyClock, reading
from headgate.costs import Costs
from headgate.decision import Decision, Fields, joined, new_decision
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
    check_costs,
    new_rlock,
    release_down_to,
    while_locked,
)
from headgate.stores.meters import Meter, MeterState, meter_for
from headgate.stores.request import Request

T = TypeVar("T")

NEVER: int = -(2**62)
"""The time of what does not happen, as in `meters`."""

SHARDS: int = 64  # a dictionary of a million keys takes 30 ms to grow, one of these half a millisecond
LAST_SHARD: int = SHARDS - 1
NEW_KEYS_PER_LOOK: int = 8  # in plain Python, beginning to look takes as long as looking at a key
LOOKED_AT_FOR_NEW_KEYS: int = 2 * NEW_KEYS_PER_LOOK
LOOKED_AT_WHEN_FULL: int = 32
GRACE_US: int = 3_600_000_000  # how much longer a state lives that was written at a time of the caller's own


class _Overflow:
    """The key that all new keys share while the store is full; equal to no key that a caller can write."""

    def __repr__(self) -> str:
        return "<overflow>"


OVERFLOW = _Overflow()
"""The place in a receipt of units that a full memory store counted in its overflow state."""


class Counters:
    """All states of a memory store, and the lock over them.

    Attributes:
        lock: Held during every call.
        busy: Whether a call is under way; a thread that holds the lock and finds it set is inside that call.
        keys: How many states are kept.
        max_keys: How many may be.
        overflowed: How many calls were counted in an overflow state.
        births: The last birth that was given to a state.
    """

    def __init__(self, clock: Clock, max_keys: int) -> None:
        self.clock = clock
        # The usual clock is read without a call of ours in between; where this is compiled, without one of Python's either.
        self.is_usual: bool = type(clock) is SteadyClock and clock.is_of_system
        self.epoch_us: int = clock.epoch_us if isinstance(clock, SteadyClock) else 0
        self.max_keys: int = max_keys
        self.keys: int = 0
        self.overflowed: int = 0
        self.tables: dict[tuple[str, str], Table] = {}
        self.lock: Any = new_rlock()
        self.busy: bool = False
        self.births: int = random.SystemRandom().randrange(1, MAX_UNITS)

    def after_fork_in_child(self, forks: HeldInForks) -> None:
        """Begin with births of this process's own: with the parent's, two states could have the same birth.

        If the thread that forked is inside a call, that call goes on.
        """
        self.births = random.SystemRandom().randrange(1, MAX_UNITS)
        self.lock = forks.after_in_child(self.lock, new_rlock)
        self.busy = self.busy and self.lock._is_owned()

    def now(self) -> int:
        """Return the time in microseconds since the epoch."""
        return time.monotonic_ns() // 1000 + self.epoch_us if self.is_usual else reading(self.clock)

    def table(self, limiter: str, rule: Rule, meter: Meter) -> Table:
        """Return the states of a limiter's rule."""
        place = limiter, rule.identity
        return self.tables.get(place) or self.tables.setdefault(place, Table(self, meter))

    def make_room(self) -> None:
        """Drop a few states that equal fresh ones, if the store is full."""
        if self.keys >= self.max_keys:
            for table in list(self.tables.values()):  # another thread may bind rules at any time
                table.look_at(LOOKED_AT_WHEN_FULL, self.now())

    def alone(self, work: Callable[..., T], *args: Any) -> T:
        """Return the result of some work that no other call may interrupt."""
        result: T = while_locked(self.lock, self._alone, work, args)
        return result

    def _alone(self, work: Callable[..., T], args: tuple[Any, ...]) -> T:
        if self.busy:
            raise StoreUnavailable(REENTERED)
        self.busy = True
        try:
            return work(*args)
        finally:
            self.busy = False

    def states(self) -> dict[tuple[tuple[str, str], object], State]:
        """Return everything that is counted: by limiter and rule, and key, as the pure functions have it."""
        return {
            (place, key): state
            for place, table in list(self.tables.items())
            for key, state in table.states()
            if state is not None
        }

    def clear(self) -> None:
        """Forget everything."""
        for table in list(self.tables.values()):
            table.clear()
        self.keys = 0


class Table:
    """The states of one rule by key. The store's lock is held by the caller.

    Every key stands exactly once in the queue of keys to look at; only looking at it takes it out.
    """

    def __init__(self, counters: Counters, meter: Meter) -> None:
        self.counters: Counters = counters
        self.meter: Meter = meter
        self.blank: MeterState = meter.new()
        """What every key without a state of its own is asked by; it is never charged."""
        self.clear()

    def clear(self) -> None:
        """Forget all states; the counters' number of keys is for the caller to set."""
        self.shards: list[dict[PlainKey, MeterState]] = [{} for _ in range(SHARDS)]
        self.queue: deque[PlainKey] = deque()
        self.overflow: MeterState = self.meter.new()
        # Until when, by the store's clock, a state stays that was written at a time of the caller's own: that time
        # may run on another scale, so it cannot say when the state has become fresh.
        self.kept: dict[MeterState, int] = {}

    def states(self) -> list[tuple[object, State | None]]:
        """Return all states with their keys, as the pure functions have them."""
        found: list[tuple[object, MeterState]] = [(OVERFLOW, self.overflow)]
        for shard in self.shards:
            found += shard.items()
        return [(key, self.meter.as_tuple(state)) for key, state in found]

    def get(self, key: PlainKey) -> MeterState | None:
        """Return the state of a key, if it has one of its own."""
        shard = self.shards[hash(key) & LAST_SHARD]
        return shard.get(key)

    def find(self, place: object) -> MeterState | None:
        """Return the state that a receipt names."""
        return self.overflow if place is OVERFLOW else self.get(place)  # type: ignore[arg-type]  # a receipt of ours

    def without_own(self, now: int, has_room: bool) -> MeterState:
        """Return the state by which a key without one is asked: the blank or the overflow state."""
        return self.blank if has_room and self.meter.fresh_at(self.overflow) <= now else self.overflow

    def add(self, key: PlainKey, now: int) -> MeterState:
        """Return a new state for a key, by the time of the store's clock."""
        if not len(self.queue) % NEW_KEYS_PER_LOOK:
            self.look_at(LOOKED_AT_FOR_NEW_KEYS, now)
        state = self.meter.new()
        shard = self.shards[hash(key) & LAST_SHARD]
        shard[key] = state
        self.counters.keys += 1
        self.queue.append(key)
        return state

    def look_at(self, most: int, now: int) -> None:
        """Drop those among the next few keys whose state equals a fresh one."""
        queue, shards, meter, kept = self.queue, self.shards, self.meter, self.kept
        for _ in range(min(most, len(queue))):
            key = queue[0]
            shard = shards[hash(key) & LAST_SHARD]
            state = shard.get(key)
            if (
                state is not None
            ):  # it is if a signal handler has raised between dropping it and the next step
                until = kept.get(state) if kept and state.birth else None
                if (meter.fresh_at(state) if until is None else until) > now:
                    queue.rotate(-1)
                    continue
                if kept:
                    kept.pop(state, None)
                del shard[key]
                self.counters.keys -= 1
            queue.popleft()

    def written(self, state: MeterState, explicit_now: int | None) -> None:
        """Take note of the clock by which a state was written: the caller's own, or the store's."""
        if explicit_now is not None:
            left = self.meter.fresh_at(state) - explicit_now
            self.kept[state] = self.counters.now() + (max(0, left)) + GRACE_US
        elif self.kept:
            self.kept.pop(state, None)


class Slot:
    """One rule of a gate in one tier, and what the call under way has found out about it.

    A gate makes its slots once. They are in use while the store's lock is held, so no call needs any of its own.
    """

    __slots__ = ("birth", "cost", "empty_at", "key", "meter", "place", "state", "table", "used")

    def __init__(self, place: int, meter: Meter, table: Table) -> None:
        self.place: int = place
        """Which of the gate's rules it is."""
        self.meter: Meter = meter
        self.table: Table = table
        self.state: MeterState = table.blank
        self.key: PlainKey = ""
        self.cost: int = 0
        self.used: int = 0
        self.birth: int = 0
        self.empty_at: int = NEVER
        """When nothing will be counted any more; known of units that were charged."""

    def decision(self, names: tuple[str, ...], at: int, admitted: bool, charged: bool) -> Decision:
        """Return what this rule says of units that all rules admit, and that may be charged by now, or that one refuses."""
        meter, cost, used = self.meter, self.cost, self.used
        is_free, retry_after = True, NEVER
        if not admitted:
            excess = used + cost * meter.part - meter.most
            if cost and excess > 0:
                is_free = False
                retry_after = meter.free_at(self.state, at, excess)
                if retry_after != NEVER:
                    retry_after -= at
            cost = 0
        empty_at = self.empty_at if charged and cost else meter.empty_at(self.state, at, used, cost)
        reset_after = NEVER if empty_at == NEVER else empty_at - at
        remaining = (meter.most - used) // meter.part - cost
        if remaining < 0:
            remaining = 0
        return new_decision(names, is_free, meter.limit, remaining, retry_after, reset_after)


class MemoryGate:
    """A limiter's rules over the tables of a memory store."""

    def __init__(self, counters: Counters, limiter: str, rules: tuple[Rule, ...]) -> None:
        self.counters: Counters = counters
        self.limiter = limiter
        self.rules = rules
        self.has_one_rule: bool = len(rules) == 1
        self.names: tuple[str, ...] = tuple([rule.name for rule in rules])
        scopes = [rule.scope for rule in rules]
        self.is_plain: bool = all(scope is None for scope in scopes)
        self.scopes: tuple[str | None, ...] = tuple([None if scope == SHARED else scope for scope in scopes])
        """What the entries of a key are called; `None` for the key of all callers."""
        self.named: int = -1 if None in scopes else len(set(self.scopes) - {None})
        """How many entries a key has that is a mapping; it cannot be one if this is negative."""
        self.pick: Callable[[Key | None], tuple[PlainKey, ...]] = key_picker(rules)
        self.tiers: Tiers[tuple[Slot, ...]] = Tiers(rules, self.make_slots)
        self.own: tuple[Slot, ...] = self.tiers.own
        self.by_tier: dict[str, tuple[Slot, ...]] = self.tiers.by_tier
        self.always_fits: int = self.tiers.always_fits
        """A cost up to this one needs no closer look."""

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

    def ask(self, request: Request) -> Answer:
        """Answer a request: find the states of all rules, ask all of them, and charge all or none."""
        key, cost, tier = request.key, request.cost, request.tier
        if type(cost) is int and 0 <= cost <= self.always_fits:
            units = cost
            slots = self.own if tier is None else self.by_tier.get(tier, self.own)
        else:
            check_costs(self.rules, request)
            units = cost if type(cost) is int else -1
            slots = self.tiers.of(tier, request.quotas)
        keys = None if self.is_plain and type(key) is str else self.keys_of(key)
        lock = self.counters.lock  # kept: a fork during the call replaces it
        taken = lock._recursion_count()
        try:  # as in `while_locked`, which would cost a call
            lock.acquire()
            answer = self.ask_alone(request, slots, keys, units)
            lock.release()
        except BaseException:
            release_down_to(lock, taken)
            raise
        return answer

    def ask_alone(
        self, request: Request, slots: tuple[Slot, ...], keys: tuple[PlainKey, ...] | None, units: int
    ) -> Answer:
        """Answer a request while the lock is held.

        Without `keys`, the one key is that of all rules; if `units` is negative, each rule has a cost of its own. One
        function does it all: in plain Python, every call of another one takes a fiftieth of the time.
        """
        operation, now, counters = request.operation, request.now, self.counters
        if counters.busy:
            raise StoreUnavailable(REENTERED)
        counters.busy = True
        try:
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
                if slot.cost and used + slot.cost * meter.part > meter.most:
                    admitted = False
                # Last: if a loop inside `try` ends with an `if`, Python 3.12 and 3.13 leave its jump back out of the `try`.
                slot.state = state
                slot.used = used
            if has_new and (counters.overflowed or counters.max_keys - counters.keys < len(slots)):
                admitted = self.find_room(slots, at)
            if request.replaces is not None:
                return self.move(request, slots, at)
            holds, charged = False, admitted
            if operation != "hit":  # first, because most are
                if operation == "peek":
                    charged = False
                elif operation == "record":
                    self.record(slots, at, now)
                    return RECORDED
                else:
                    holds = True
            receipts = self.charge(slots, at, now, holds) if charged else None
            if self.has_one_rule:
                slot = slots[0]
                return slot.decision(self.names, at, admitted, charged), receipts
            return self.decision(slots, at, admitted, charged), receipts
        finally:
            counters.busy = False

    def decision(self, slots: tuple[Slot, ...], at: int, admitted: bool, charged: bool) -> Decision:
        """Return what all rules say together.

        A rule that would have admitted what another one refuses shows what it has left without this call.
        """
        # Not in `ask_alone`: what a comprehension uses, Python 3.11 puts into cells at every call of the function around it.
        return joined([slot.decision(self.names, at, admitted, charged) for slot in slots])

    def keys_of(self, key: Key | None) -> tuple[PlainKey, ...]:
        """Return the key of each rule; what is not as usual is for `pick` to judge."""
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
        """Let new keys be asked by overflow states, if the store is full or those have not expired since it was.

        Return whether all rules admit then.
        """
        counters = self.counters
        counters.make_room()  # it may drop what was found
        room = counters.max_keys - counters.keys
        overflowed, admitted = False, True
        for slot in slots:
            state = slot.table.get(slot.key)
            if state is None:
                state = slot.table.without_own(at, room > 0)
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
        """Charge every rule, and return the receipts if they are wanted and anything was charged."""
        try:
            # A function of its own: of a loop inside `try`, Python 3.13 leaves out the jump back to its head.
            return self.charge_each(slots, at, now, holds)
        except BaseException:  # a signal handler has raised, or there is no memory left
            try:
                self.undo(slots, at)
            finally:  # once more, in case another one raised meanwhile; what is undone stays so
                self.undo(slots, at)
            raise

    def charge_each(self, slots: tuple[Slot, ...], at: int, now: int | None, holds: bool) -> Receipts | None:
        """As `charge`; if it raises, some may be charged and others not."""
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
            slot.birth = birth
            if receipts is not None:
                receipt = meter.receipt(state, at, slot.used, cost, birth)
                receipts.append((OVERFLOW if state is table.overflow else slot.key, receipt))
            if state is table.blank:
                state = table.add(slot.key, counters.now() if now is not None else at)
                slot.state = state
            slot.empty_at = meter.charge(state, at, slot.used, cost, birth)
            if now is not None or table.kept:
                table.written(state, now)
        return tuple(receipts) if receipts is not None and charged else None

    def undo(self, slots: tuple[Slot, ...], at: int) -> None:
        """Give back what was charged before the call was broken off."""
        for slot in slots:
            meter, state = slot.meter, slot.state
            if state is not slot.table.blank and meter.used(state, at) > slot.used:
                receipt = meter.receipt(state, at, slot.used, slot.cost, slot.birth)
                meter.refund(state, receipt, slot.cost, at)

    def record(self, slots: tuple[Slot, ...], at: int, now: int | None) -> None:
        """Count units that have been used already, even beyond the limits."""
        for slot in slots:
            if slot.cost:
                slot.meter.check_countable(slot.used, slot.cost)
        self.charge(slots, at, now, False)

    def move(self, request: Request, slots: tuple[Slot, ...], at: int) -> Answer:
        """Take units in place of those of a hold, or renew its leases."""
        replaced: Receipts = request.replaces  # type: ignore[assignment]  # it has some
        receipts: list[Receipt] = []
        for slot in slots:
            place, receipt = replaced[slot.place]
            if receipt and place != (OVERFLOW if slot.state is slot.table.overflow else slot.key):
                # Charged elsewhere, because the store was full then or is so now: leases are renewed there, units stay.
                if request.operation == "renew":
                    slot.state = slot.table.find(place) or slot.table.blank
                else:
                    receipt = ()
            receipts.append(receipt)
        verdicts = [
            slot.meter.ask_move(slot.state, receipt, at, slot.cost) if receipt else None
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
            fields.append(slot.decision(self.names, at, admitted, False).fields[0])
        decision = Decision.make(self.names, fields)
        if not admitted:
            return decision, None
        taken = self.move_each(slots, receipts, at, request.now)
        return decision, taken if request.operation == "hold" else None

    def move_each(
        self, slots: tuple[Slot, ...], receipts: list[Receipt], at: int, now: int | None
    ) -> Receipts:
        """Charge every rule in place of its receipt, and return the new receipts."""
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
            table.written(state, now)
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
                    slot.table.written(state, now)

    def reset(self, key: Key | None) -> None:
        """Forget what was counted for a key."""
        self.counters.alone(self.reset_alone, self.keys_of(key))

    def reset_alone(self, keys: tuple[PlainKey, ...]) -> None:
        for slot in self.own:
            state = slot.table.get(keys[slot.place])
            if state is not None:
                slot.meter.clear(state)


class ImmediateGate:
    """A gate that never waits, for coroutines."""

    def __init__(self, gate: Gate) -> None:
        self.gate: Gate = gate

    async def ask(self, request: Request) -> Answer:
        """See `Gate.ask`."""
        return self.gate.ask(request)

    async def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        """See `Gate.refund`."""
        self.gate.refund(receipts, cost, now)

    async def reset(self, key: Key | None) -> None:
        """See `Gate.reset`."""
        self.gate.reset(key)
