"""The memory store's counters: one path from a request to its answer.

`MemoryGate.ask` finds the states of all rules, asks all of them, and charges all or none, under one lock. This file is also
compiled, with the types in `counters.pxd`.

The lock is reentrant, but a call is not: a signal handler, a `__del__` or a weak reference's callback may run in the middle
of a call, on its thread, and what it asks then is refused at once (`Counters.busy`) instead of being counted between two
steps.

Expiry has no thread: every new key looks at a few old ones and drops those whose state equals a fresh one. A live key is
never dropped to make room. When the store is full, new keys share one overflow state, with the rule's quota, until nothing
is counted there any more.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from headgate.algorithms import Algorithm, Receipt, State, decide_all
from headgate.clock import Clock, SteadyClock, reading
from headgate.costs import Costs
from headgate.decision import Decision, joined, new_decision
from headgate.errors import StoreUnavailable
from headgate.keys import SHARED_KEY, Key, PlainKey, key_picker
from headgate.quota import MAX_UNITS
from headgate.rules import SHARED, Rule
from headgate.stores.base import RECORDED, REENTERED, Answer, Receipts, Tiers, check_costs, while_locked
from headgate.stores.meters import Meter, MeterState, meter_for
from headgate.stores.request import Request

T = TypeVar("T")

# A signal handler may run, and raise, wherever plain Python calls something; so it needs `while_locked`.
# Between two lines of compiled code none runs, and `acquire` and `release` take a third of the time.
IS_COMPILED: bool = not __file__.endswith(".py")

NEVER: int = -(2**62)
"""The time of what does not happen, as in `meters`."""

SHARDS: int = 64  # a dictionary of a million keys takes 30 ms to grow, one of these half a millisecond
LOOKED_AT_PER_NEW_KEY: int = 2
LOOKED_AT_WHEN_FULL: int = 32
GRACE_US: int = 3_600_000_000  # how much longer a state lives that was written at a time of the caller's own


class _Overflow:
    """The key that all new keys share while the store is full; equal to no key that a caller can write."""

    def __repr__(self) -> str:
        return "<overflow>"


OVERFLOW = _Overflow()


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
        # The usual clock is read without a call of ours in between.
        self.monotonic_ns: Callable[[], int] | None = None
        self.epoch_us: int = 0
        if type(clock) is SteadyClock and clock.monotonic_ns is time.monotonic_ns:
            self.monotonic_ns, self.epoch_us = clock.monotonic_ns, clock.epoch_us
        self.max_keys: int = max_keys
        self.keys: int = 0
        self.overflowed: int = 0
        self.tables: dict[tuple[str, str], Table] = {}
        self.take_lock(threading.RLock())
        self.busy: bool = False
        self.births: int = random.SystemRandom().randrange(1, MAX_UNITS)

    def after_fork_in_child(self) -> None:
        """Begin with a lock and births of this process's own: with the parent's, two states could have the same birth.

        If the thread that forked is inside a call, that call goes on, and releases the lock that it has taken. No other
        thread that was inside one is in this process.
        """
        births, lock = random.SystemRandom().randrange(1, MAX_UNITS), threading.RLock()
        is_inside = self.busy and self.lock._is_owned()  # also used by `Condition`
        self.busy = is_inside
        self.births = births
        self.take_lock(lock)

    def take_lock(self, lock: Any) -> None:
        """Use a lock from now on."""
        self.lock = lock
        self.acquire: Callable[[], bool] = lock.acquire  # looked up once, not on every call
        self.release: Callable[[], None] = lock.release

    def now(self) -> int:
        """Return the time in microseconds since the epoch."""
        if self.monotonic_ns is None:
            return reading(self.clock)
        nanoseconds = self.monotonic_ns()
        return nanoseconds // 1000 + self.epoch_us

    def table(self, limiter: str, rule: Rule, meter: Meter) -> Table:
        """Return the states of a limiter's rule."""
        return self.tables.setdefault((limiter, rule.identity), Table(self, meter))

    def make_room(self) -> None:
        """Drop a few states that equal fresh ones, if the store is full."""
        if self.keys >= self.max_keys:
            for table in list(self.tables.values()):  # another thread may bind rules at any time
                table.look_at(LOOKED_AT_WHEN_FULL)

    def alone(self, work: Callable[..., T], *args: Any) -> T:
        """Return what some work returns that no other call may interrupt."""
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
        shard = self.shards[hash(key) & (SHARDS - 1)]
        return shard.get(key)

    def find(self, place: object) -> MeterState | None:
        """Return the state that a receipt names."""
        return self.overflow if place is OVERFLOW else self.get(place)  # type: ignore[arg-type]  # a receipt of ours

    def without_own(self, now: int, has_room: bool) -> MeterState:
        """Return the state by which a key without one is asked: the blank or the overflow state."""
        return self.blank if has_room and self.meter.fresh_at(self.overflow) <= now else self.overflow

    def add(self, key: PlainKey) -> MeterState:
        """Return a new state for a key."""
        self.look_at(LOOKED_AT_PER_NEW_KEY)
        state = self.meter.new()
        shard = self.shards[hash(key) & (SHARDS - 1)]
        shard[key] = state
        self.counters.keys += 1
        self.queue.append(key)
        return state

    def look_at(self, most: int) -> None:
        """Drop those among the next few keys whose state equals a fresh one."""
        queue = self.queue
        if most > len(queue):
            most = len(queue)
        now = self.counters.now() if most else 0
        for _ in range(most):
            key = queue[0]
            shard = self.shards[hash(key) & (SHARDS - 1)]
            state = shard.get(key)
            if state is None:  # a signal handler has raised between dropping it and the next step
                queue.popleft()
            elif self.is_over(state, now):
                self.kept.pop(state, None)
                del shard[key]
                self.counters.keys -= 1
                queue.popleft()
            else:
                queue.rotate(-1)

    def is_over(self, state: MeterState, now: int) -> bool:
        """Return whether a state may be dropped."""
        if self.kept and state.birth:
            until = self.kept.get(state)
            if until is not None:
                return until <= now
        return self.meter.fresh_at(state) <= now

    def written(self, state: MeterState, explicit_now: int | None) -> None:
        """Take note of the clock by which a state was written: the caller's own, or the store's."""
        if explicit_now is not None:
            left = self.meter.fresh_at(state) - explicit_now
            self.kept[state] = self.counters.now() + (max(0, left)) + GRACE_US
        elif self.kept:
            self.kept.pop(state, None)


class Slot:
    """One rule of a gate, and what the call under way has found out about it.

    A gate makes its slots once. They are in use while the store's lock is held, so no call needs any of its own.
    """

    __slots__ = ("cost", "empty_at", "key", "meter", "own", "state", "table", "used")

    def __init__(self, own: Meter, table: Table) -> None:
        self.own: Meter = own
        self.table: Table = table
        self.meter: Meter = own
        self.state: MeterState = table.blank
        self.key: PlainKey = ""
        self.cost: int = 0
        self.used: int = 0
        self.empty_at: int = 0

    def decision(self, names: tuple[str, ...], at: int, admitted: bool) -> Decision:
        """Return what this rule says of units that all rules admit, and `empty_at` is known, or that some rule refuses."""
        meter, cost, retry_after, reset_after, is_free = self.meter, self.cost, NEVER, NEVER, True
        if not admitted:
            excess = self.used + cost * meter.part - meter.most
            self.empty_at = meter.empty_at(self.state, at, self.used, 0)
            if cost and excess > 0:
                is_free = False
                retry_after = meter.free_at(self.state, at, excess)
                if retry_after != NEVER:
                    retry_after -= at
            cost = 0
        if self.empty_at != NEVER:
            reset_after = self.empty_at - at
        remaining = (meter.most - self.used) // meter.part - cost
        return new_decision(names, is_free, meter.limit, max(0, remaining), retry_after, reset_after)


class MemoryGate:
    """A limiter's rules over the tables of a memory store."""

    def __init__(self, counters: Counters, limiter: str, rules: tuple[Rule, ...]) -> None:
        self.counters: Counters = counters
        self.names: tuple[str, ...] = tuple([rule.name for rule in rules])
        self.scopes: tuple[str | None, ...] = tuple([rule.scope for rule in rules])
        self.is_plain: bool = all(scope is None for scope in self.scopes)
        self.named: int = len(set(self.scopes) - {SHARED, None})
        self.pick: Callable[[Key | None], tuple[PlainKey, ...]] = key_picker(rules)
        self.rules = rules
        self.tiers: Tiers[tuple[Meter, ...]] = Tiers(rules, _meters)
        self.own: tuple[Meter, ...] = self.tiers.own
        self.by_tier: dict[str, tuple[Meter, ...]] = self.tiers.by_tier
        self.slots: tuple[Slot, ...] = tuple(
            [
                Slot(meter, counters.table(limiter, rule, meter))
                for rule, meter in zip(rules, self.own, strict=True)
            ]
        )
        self.always_fits: int = self.tiers.always_fits
        """A cost up to this one needs no closer look."""

    def ask(self, request: Request) -> Answer:
        """Answer a request: find the states of all rules, ask all of them, and charge all or none."""
        key, cost = request.key, request.cost
        meters = self.own if request.tier is None else self.by_tier.get(request.tier, self.own)
        if type(cost) is not int or not 0 <= cost <= self.always_fits:
            check_costs(self.rules, request)
            meters = self.tiers.of(request.tier, request.quotas)
        keys = None if self.is_plain and type(key) is str else self.keys_of(key)
        if not IS_COMPILED:
            return while_locked(self.counters.lock, self.ask_alone, request, meters, keys)
        release = self.counters.release  # after a fork in the middle, the counters have another lock
        self.counters.acquire()
        try:
            return self.ask_alone(request, meters, keys)
        finally:
            release()

    def ask_alone(
        self, request: Request, meters: tuple[Meter, ...], keys: tuple[PlainKey, ...] | None
    ) -> Answer:
        """Answer a request while the lock is held."""
        operation, now, counters = request.operation, request.now, self.counters
        if counters.busy:
            raise StoreUnavailable(REENTERED)
        counters.busy = True
        try:
            at = counters.now() if now is None else now
            self.find(meters, request.key, keys, at)
            charges = self.take_costs(request.cost)
            if request.replaces is not None:
                return self.move(request, request.replaces, at)
            is_hit = operation == "hit"  # first, because most are
            if not is_hit and operation == "record":
                if charges:
                    self.record(at, now)
                return RECORDED
            receipts, admitted = None, self.look(at)
            if admitted:
                if charges and (is_hit or operation == "hold"):
                    receipts = self.charge(at, now, not is_hit)
                else:
                    self.measure(at)
            return self.decision(at, admitted), receipts
        finally:
            counters.busy = False

    def take_costs(self, cost: Costs) -> bool:
        """Put into the slots what a request costs each rule, and return whether it costs anything."""
        units, charges = 0, False
        if type(cost) is int:
            units = cost
            charges = units > 0
            for slot in self.slots:
                slot.cost = units
        else:
            costs: tuple[int, ...] = cost  # type: ignore[assignment]
            for i in range(len(self.slots)):
                slot = self.slots[i]
                slot.cost = costs[i]
                if slot.cost:
                    charges = True
        return charges

    def keys_of(self, key: Key | None) -> tuple[PlainKey, ...]:
        """Return the key of each rule; what is not as usual is for `pick` to judge."""
        if type(key) is not dict or len(key) != self.named:
            return self.pick(key)
        parts: dict[Any, Any] = key
        keys: list[PlainKey] = []
        for scope in self.scopes:
            part = SHARED_KEY if scope == SHARED else parts.get(scope)
            if type(part) is not str:
                return self.pick(key)
            keys.append(part)
        return tuple(keys)

    def find(
        self, meters: tuple[Meter, ...], key: Key | None, keys: tuple[PlainKey, ...] | None, at: int
    ) -> None:
        """Put into the slots which states the keys are counted in; without `keys`, the one key is that of all rules."""
        is_missing = False
        for i in range(len(self.slots)):
            slot = self.slots[i]
            slot.meter = meters[i]
            slot.key = key if keys is None else keys[i]  # type: ignore[assignment]  # a plain key
            state = slot.table.get(slot.key)
            if state is None:
                is_missing = True
            else:
                slot.state = state
        if is_missing:
            self.find_new(at)

    def find_new(self, at: int) -> None:
        """As `find`, when not all keys have states of their own: some are asked by a blank or an overflow state."""
        self.counters.make_room()  # it may drop what was found
        room = self.counters.max_keys - self.counters.keys
        overflowed = False
        for slot in self.slots:
            state = slot.table.get(slot.key)
            if state is None:
                state = slot.table.without_own(at, room > 0)
                if state is slot.table.blank:
                    room -= 1
                else:
                    overflowed = True
            slot.state = state
        if overflowed:
            self.counters.overflowed += 1

    def look(self, at: int) -> bool:
        """Ask every rule how much is in use, and return whether all admit."""
        admitted = True
        for slot in self.slots:
            meter = slot.meter
            used = meter.used(slot.state, at)
            slot.used = used
            if slot.cost and used + slot.cost * meter.part > meter.most:
                admitted = False
        return admitted

    def measure(self, at: int) -> None:
        """Put into the slots when each rule would be empty if it were charged."""
        for slot in self.slots:
            slot.empty_at = slot.meter.empty_at(slot.state, at, slot.used, slot.cost)

    def charge(self, at: int, now: int | None, holds: bool) -> Receipts | None:
        """Charge every rule, and return the receipts if they are wanted."""
        try:
            # A function of its own: of a loop inside `try`, Python 3.13 leaves out the jump back to its head.
            return self.charge_each(at, now, holds)
        except BaseException:  # a signal handler has raised, or there is no memory left
            try:
                self.undo(at)
            finally:  # once more, in case another one raised meanwhile; what is undone stays so
                self.undo(at)
            raise

    def charge_each(self, at: int, now: int | None, holds: bool) -> Receipts | None:
        """As `charge`; if it raises, some may be charged and others not."""
        receipts: list[tuple[object, Receipt]] | None = [] if holds else None
        counters = self.counters
        for slot in self.slots:
            table = slot.table
            if not slot.cost:
                slot.empty_at = slot.meter.empty_at(slot.state, at, slot.used, 0)
                if receipts is not None:
                    receipts.append((slot.key, ()))
                continue
            counters.births += 1
            if receipts is not None:
                receipt = slot.meter.receipt(slot.state, at, slot.used, slot.cost, counters.births)
                receipts.append((OVERFLOW if slot.state is table.overflow else slot.key, receipt))
            if slot.state is table.blank:
                slot.state = table.add(slot.key)
            slot.empty_at = slot.meter.charge(slot.state, at, slot.used, slot.cost, counters.births)
            if now is not None or table.kept:
                table.written(slot.state, now)
        return None if receipts is None else tuple(receipts)

    def undo(self, at: int) -> None:
        """Give back what was charged before the call was broken off."""
        for slot in self.slots:
            meter, state = slot.meter, slot.state
            if state is not slot.table.blank and meter.used(state, at) > slot.used:
                receipt = meter.receipt(state, at, slot.used, slot.cost, state.birth)
                meter.refund(state, receipt, slot.cost, at)

    def decision(self, at: int, admitted: bool) -> Decision:
        """Return the decision of all rules, when their slots are filled.

        A rule that would have admitted what another one refuses shows what it has left without this call.
        """
        if len(self.slots) == 1:
            slot = self.slots[0]
            return slot.decision(self.names, at, admitted)
        return joined([slot.decision(self.names, at, admitted) for slot in self.slots])

    def record(self, at: int, now: int | None) -> None:
        """Count units that have been used already, even beyond the limits."""
        for slot in self.slots:
            slot.used = slot.meter.used(slot.state, at)
            if slot.cost:
                slot.meter.check_countable(slot.used, slot.cost)
        self.charge(at, now, False)

    def move(self, request: Request, replaced: Receipts, at: int) -> Answer:
        """Take units in place of those of a hold. It is not often asked, so the pure functions decide it."""
        slots, costs = list(self.slots), request.costs(len(self.slots))
        places = [OVERFLOW if slot.state is slot.table.overflow else slot.key for slot in slots]
        # Units that were charged elsewhere, because the store was full then or is so now, stay there.
        receipts = [
            receipt if receipt and place == own else None
            for (place, receipt), own in zip(replaced, places, strict=True)
        ]
        self.counters.births += 1
        birth = self.counters.births
        algorithms = [slot.meter.algorithm for slot in slots]
        before = [slot.meter.as_tuple(slot.state) for slot in slots]
        after, verdicts = decide_all(algorithms, before, at, costs, birth, receipts)
        decision = Decision.make(self.names, verdicts)
        if not decision.allowed:
            return decision, None
        try:
            self.put(before, after, request.now)
        except BaseException:  # as in `charge`
            try:
                self.put(after, before, request.now)
            finally:
                self.put(after, before, request.now)
            raise
        taken = [
            (place, algorithm.receipt(old, state, cost) if state and cost else ())
            for place, algorithm, old, state, cost in zip(
                places, algorithms, before, after, costs, strict=True
            )
        ]
        return decision, tuple(taken)

    def put(self, before: Sequence[State | None], after: Sequence[State | None], now: int | None) -> None:
        """Write the states that have changed."""
        for i in range(len(self.slots)):
            slot = self.slots[i]
            if after[i] is before[i]:
                continue
            if slot.state is slot.table.blank:
                slot.state = slot.table.add(slot.key)
            if after[i] is None:
                slot.meter.clear(slot.state)
            else:
                slot.meter.load(slot.state, after[i])  # type: ignore[arg-type]
            slot.table.written(slot.state, now)

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        """Give back units of a hold, as far as they still count."""
        self.counters.alone(self.refund_alone, receipts, cost, now)

    def refund_alone(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        at = self.counters.now() if now is None else now
        self.take_costs(cost)
        for i in range(len(self.slots)):
            slot = self.slots[i]
            place, receipt = receipts[i]
            state = slot.table.find(place) if receipt and slot.cost else None
            if state is not None:
                slot.own.refund(state, receipt, slot.cost, at)
                if now is not None or slot.table.kept:
                    slot.table.written(state, now)

    def reset(self, key: Key | None) -> None:
        """Forget what was counted for a key."""
        self.counters.alone(self.reset_alone, key, self.keys_of(key))

    def reset_alone(self, key: Key | None, keys: tuple[PlainKey, ...] | None) -> None:
        for i in range(len(self.slots)):
            slot = self.slots[i]
            state = slot.table.get(key if keys is None else keys[i])  # type: ignore[arg-type]  # a plain key
            if state is not None:
                slot.own.clear(state)


def _meters(algorithms: tuple[Algorithm, ...]) -> tuple[Meter, ...]:
    return tuple([meter_for(algorithm) for algorithm in algorithms])
