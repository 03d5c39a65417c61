"""Rules over states that change in place: what the memory store counts with.

`headgate.algorithms` explains each rule and is the reference; a meter gives the same answers without making a new state for
every call. It asks and charges in two steps, so that several rules can be asked before any of them is charged.

A unit is `part` parts, and at most `most` parts may be in use: a token bucket needs the fractions, windows count units.

This file is also compiled, with the types in `meters.pxd`. So every number stays below 2^63, also in between: where a
product could pass it, a division comes first. And a signal handler may raise wherever Python calls something, so a state is
changed in one go: nothing is called between the first assignment and the last.
"""

from __future__ import annotations

from array import array

from headgate.algorithms import FixedWindow, Receipt, SlidingWindow, State, TokenBucket, algorithm_for
from headgate.errors import CostTooHigh
from headgate.quota import MAX_UNITS as _MAX_UNITS
from headgate.quota import Quota
from headgate.rules import Rule

MAX_UNITS: int = _MAX_UNITS
NEVER: int = -(2**62)
"""The time of what does not happen."""


class MeterState:
    """What is counted for one key under one rule; with a birth of 0, nothing is."""

    __slots__ = ("birth",)

    def __init__(self) -> None:
        self.birth: int = 0


class Meter:
    """A rule made ready for one quota."""

    __slots__ = ("limit", "most", "name", "part")

    def __init__(self, name: str, limit: int, part: int) -> None:
        self.name: str = name
        self.limit: int = limit
        self.part: int = part
        self.most: int = limit * part

    def new(self) -> MeterState:
        """Return a state in which nothing is counted."""
        raise NotImplementedError

    def clear(self, s: MeterState) -> None:
        """Forget what is counted in a state."""
        raise NotImplementedError

    def used(self, s: MeterState, now: int) -> int:
        """Return the parts in use; later answers are the same whether this was asked or not."""
        raise NotImplementedError

    def charge(self, s: MeterState, now: int, used: int, cost: int, birth: int) -> int:
        """Count units on top of what `used` has returned, and return when nothing will be counted any more."""
        raise NotImplementedError

    def receipt(self, s: MeterState, now: int, used: int, cost: int, birth: int) -> Receipt:
        """Return what gives units back that are about to be charged with the same arguments."""
        raise NotImplementedError

    def free_at(self, s: MeterState, now: int, excess: int) -> int:
        """Return when so many of the parts in use will be free; `NEVER` if no waiting helps."""
        raise NotImplementedError

    def empty_at(self, s: MeterState, now: int, used: int, cost: int) -> int:
        """Return when nothing will be counted any more if units were charged on top of what is used."""
        raise NotImplementedError

    def refund(self, s: MeterState, receipt: Receipt, cost: int, now: int) -> None:
        """Give back up to `cost` of the receipt's units, as far as they still count."""
        raise NotImplementedError

    def fresh_at(self, s: MeterState) -> int:
        """Return the first time at which the state equals a new one."""
        raise NotImplementedError

    def as_tuple(self, s: MeterState) -> State | None:
        """Return the state as the pure functions have it."""
        raise NotImplementedError

    def check_countable(self, used: int, cost: int) -> None:
        """Refuse units that would take a count beyond what every store keeps exactly."""
        if cost > (MAX_UNITS - used) // self.part:
            raise CostTooHigh(cost, (MAX_UNITS - used) // self.part, self.name)


class FixedState(MeterState):
    """The window that is counted in, and the units in it."""

    __slots__ = ("count", "index")

    def __init__(self) -> None:
        self.birth = 0
        self.index: int = -1
        self.count: int = 0


class FixedMeter(Meter):
    """Units in the window that `now` falls into, or in a later one that was already counted in."""

    __slots__ = ("period",)

    def __init__(self, name: str, limit: int, period: int) -> None:
        super().__init__(name, limit, 1)
        self.period: int = period

    def new(self) -> MeterState:
        return FixedState()

    def clear(self, s: MeterState) -> None:
        state: FixedState = s  # type: ignore[assignment]  # each meter is given its own states
        state.birth = 0
        state.index = -1
        state.count = 0

    def used(self, s: MeterState, now: int) -> int:
        state: FixedState = s  # type: ignore[assignment]
        return state.count if state.index >= now // self.period else 0

    def charge(self, s: MeterState, now: int, used: int, cost: int, birth: int) -> int:
        state: FixedState = s  # type: ignore[assignment]
        if not used:
            state.birth = birth
            state.index = now // self.period
        state.count = used + cost
        return (state.index + 1) * self.period

    def receipt(self, s: MeterState, now: int, used: int, cost: int, birth: int) -> Receipt:
        state: FixedState = s  # type: ignore[assignment]
        return (state.birth, state.index, cost) if used else (birth, now // self.period, cost)

    def free_at(self, s: MeterState, now: int, excess: int) -> int:
        state: FixedState = s  # type: ignore[assignment]
        if not self.limit:
            return NEVER
        index = now // self.period
        return ((max(index, state.index)) + 1) * self.period

    def empty_at(self, s: MeterState, now: int, used: int, cost: int) -> int:
        state: FixedState = s  # type: ignore[assignment]
        if used:
            return (state.index + 1) * self.period
        return (now // self.period + 1) * self.period if cost else now

    def refund(self, s: MeterState, receipt: Receipt, cost: int, now: int) -> None:
        state: FixedState = s  # type: ignore[assignment]
        birth, index, held = receipt
        if state.birth == birth and state.index == index:
            count = state.count - (min(held, cost))
            if count > 0:
                state.count = count
            else:
                self.clear(state)

    def fresh_at(self, s: MeterState) -> int:
        state: FixedState = s  # type: ignore[assignment]
        return (state.index + 1) * self.period

    def as_tuple(self, s: MeterState) -> State | None:
        state: FixedState = s  # type: ignore[assignment]
        return (state.birth, state.index, state.count) if state.birth else None


class SlidingState(MeterState):
    """The newest bucket, and the ones before it.

    `older` has index and units of each, oldest first. Those before the place `first` are dropped, those before `live` had
    expired when they were last looked at; `total` is the units of all that are live, the newest included.
    """

    __slots__ = ("first", "live", "newest", "older", "total", "units")

    def __init__(self) -> None:
        self.birth = 0
        self.newest: int = -1
        self.units: int = 0
        self.total: int = 0
        self.first: int = 0
        self.live: int = 0
        self.older: array[int] | None = None


class SlidingMeter(Meter):
    """Units in the buckets that are still alive; a log is one whose buckets are a microsecond wide."""

    __slots__ = ("lifetime", "width")

    def __init__(self, name: str, limit: int, width: int, lifetime: int) -> None:
        super().__init__(name, limit, 1)
        self.width: int = width
        self.lifetime: int = lifetime

    def new(self) -> MeterState:
        return SlidingState()

    def clear(self, s: MeterState) -> None:
        state: SlidingState = s  # type: ignore[assignment]
        state.birth = 0
        state.newest = -1
        state.units = 0
        state.total = 0
        state.first = 0
        state.live = 0
        state.older = None

    def used(self, s: MeterState, now: int) -> int:
        state: SlidingState = s  # type: ignore[assignment]
        if not state.units:
            return 0
        newest = state.newest * self.width
        dead = ((max(newest, now)) - self.lifetime) // self.width
        if state.newest <= dead:
            return 0
        if state.older is not None:
            self.look(state, dead)
        return state.total

    def look(self, state: SlidingState, dead: int) -> None:
        """Move the border between the buckets that have expired, those up to the index `dead`, and the live ones."""
        older = state.older
        assert older is not None
        live, size, total = state.live, len(older), state.total
        while live < size:
            index = older[live]
            if index > dead:
                break
            units = older[live + 1]
            total -= units
            live += 2
        while live > state.first:  # and if the clock went back
            index = older[live - 2]
            if index <= dead:
                break
            live -= 2
            units = older[live + 1]
            total += units
        state.live = live
        state.total = total

    def charge(self, s: MeterState, now: int, used: int, cost: int, birth: int) -> int:
        state: SlidingState = s  # type: ignore[assignment]
        index = now // self.width
        if not used:
            state.birth = birth
            state.newest = index
            state.units = cost
            state.total = cost
            state.first = 0
            state.live = 0
            state.older = None
            return index * self.width + self.lifetime
        if state.first != state.live:
            self.drop(state)
        if index <= state.newest:
            state.units += cost
            state.total += cost
            return state.newest * self.width + self.lifetime
        before = (state.newest, state.units)
        older = array("q") if state.older is None else state.older
        state.older = older
        state.newest = index
        state.units = cost
        state.total += cost
        older.extend(before)  # in the end, where a signal handler that raises finds nothing half done
        return index * self.width + self.lifetime

    def drop(self, state: SlidingState) -> None:
        """Drop the buckets that have expired."""
        older = state.older
        assert older is not None
        size, live = len(older), state.live
        if live == size:
            state.first = 0
            state.live = 0
            state.older = None
        elif live > size // 2:  # not every time, because that moves all that stay
            state.first = 0
            state.live = 0
            del older[:live]
        else:
            state.first = live

    def receipt(self, s: MeterState, now: int, used: int, cost: int, birth: int) -> Receipt:
        state: SlidingState = s  # type: ignore[assignment]
        index = now // self.width
        if not used:
            return birth, index, cost
        return state.birth, max(state.newest, index), cost

    def free_at(self, s: MeterState, now: int, excess: int) -> int:
        state: SlidingState = s  # type: ignore[assignment]
        if not self.limit:
            return NEVER
        older = state.older
        if older is not None:
            place, size = state.live, len(older)
            while place < size:
                units = older[place + 1]
                excess -= units
                if excess <= 0:
                    index = older[place]
                    return index * self.width + self.lifetime
                place += 2
        return state.newest * self.width + self.lifetime

    def empty_at(self, s: MeterState, now: int, used: int, cost: int) -> int:
        state: SlidingState = s  # type: ignore[assignment]
        if not used and not cost:
            return now
        index = now // self.width if cost else -1
        if used and state.newest > index:
            index = state.newest
        return index * self.width + self.lifetime

    def refund(self, s: MeterState, receipt: Receipt, cost: int, now: int) -> None:
        state: SlidingState = s  # type: ignore[assignment]
        birth, index, held = receipt
        if cost > held:
            cost = held
        if state.birth != birth:
            return
        if index != state.newest:
            self.refund_older(state, index, cost)
        elif cost < state.units:
            state.units -= cost
            state.total -= cost
        else:
            self.forget_newest(state)

    def refund_older(self, state: SlidingState, index: int, cost: int) -> None:
        """Give units back to a bucket before the newest, if it is still there."""
        older = state.older
        if older is None:
            return
        low, high = state.first // 2, len(older) // 2
        while low < high:
            middle = (low + high) // 2
            if older[2 * middle] < index:
                low = middle + 1
            else:
                high = middle
        place = 2 * low
        if place >= len(older) or older[place] != index:
            return
        units = older[place + 1]
        if cost > units:
            cost = units
        if place >= state.live:
            state.total -= cost
        elif cost == units:
            state.live -= 2
        if cost < units:
            older[place + 1] = units - cost
        else:
            del older[place : place + 2]  # kept without units, they would make a log larger than its limit

    def forget_newest(self, state: SlidingState) -> None:
        """Let the bucket before the newest be the newest."""
        older = state.older
        size = 0 if older is None else len(older)
        if older is None or size <= state.first:
            self.clear(state)
            return
        total, live = state.total - state.units, state.live
        size -= 2
        newest, units = older[size], older[size + 1]
        if live > size:  # it has expired, so it is not in the total
            live = size
            total += units
        state.newest = newest
        state.units = units
        state.total = total
        state.live = live
        del older[size:]

    def fresh_at(self, s: MeterState) -> int:
        state: SlidingState = s  # type: ignore[assignment]
        return state.newest * self.width + self.lifetime if state.units else 0

    def as_tuple(self, s: MeterState) -> State | None:
        state: SlidingState = s  # type: ignore[assignment]
        if not state.birth:
            return None
        older = [] if state.older is None else state.older[state.first :].tolist()
        return state.birth, *older, state.newest, state.units


class BucketState(MeterState):
    """The level at a time in ticks, the total ever refunded, and the shape that the level was measured in."""

    __slots__ = ("level", "most", "n", "part", "refunded", "time")

    def __init__(self) -> None:
        self.birth = 0
        self.level: int = 0
        self.time: int = 0
        self.refunded: int = 0
        self.n: int = 1
        self.part: int = 1
        self.most: int = 0


class BucketMeter(Meter):
    """What has been taken and has not drained away: `n` parts per tick."""

    __slots__ = ("n", "tick")

    def __init__(self, name: str, burst: int, n: int, d: int, tick: int) -> None:
        super().__init__(name, burst, d)
        self.n: int = n
        self.tick: int = tick

    def new(self) -> MeterState:
        return BucketState()

    def clear(self, s: MeterState) -> None:
        state: BucketState = s  # type: ignore[assignment]
        state.birth = 0
        state.level = 0
        state.time = 0
        state.refunded = 0

    def used(self, s: MeterState, now: int) -> int:
        state: BucketState = s  # type: ignore[assignment]
        level, passed = state.level, now // self.tick - state.time
        if passed < 0:
            passed = 0
        if passed >= -(level // -state.n):
            return 0  # drained away in its own shape: fresh for every caller
        if self.differs(state):
            level = converted(level, self.part, state.part)
            if passed >= -(level // -self.n):
                return 0
        return level - passed * self.n

    def differs(self, state: BucketState) -> bool:
        """Return whether a state was measured in another shape."""
        return state.n != self.n or state.part != self.part or state.most != self.most

    def charge(self, s: MeterState, now: int, used: int, cost: int, birth: int) -> int:
        state: BucketState = s  # type: ignore[assignment]
        time = now // self.tick
        if not used or self.differs(state):
            state.birth = birth
            state.refunded = 0
            state.n = self.n
            state.part = self.part
            state.most = self.most
        if time > state.time:
            state.time = time
        state.level = used + cost * self.part
        return (state.time - state.level // -self.n) * self.tick

    def receipt(self, s: MeterState, now: int, used: int, cost: int, birth: int) -> Receipt:
        state: BucketState = s  # type: ignore[assignment]
        time = now // self.tick
        if time < state.time:
            time = state.time
        if not used or self.differs(state):
            return birth, used, time, 0, time, self.n, self.part, self.most, cost
        return state.birth, used, time, state.refunded, state.time, self.n, self.part, self.most, cost

    def free_at(self, s: MeterState, now: int, excess: int) -> int:
        state: BucketState = s  # type: ignore[assignment]
        return self.drained_at(state, now, excess)

    def empty_at(self, s: MeterState, now: int, used: int, cost: int) -> int:
        state: BucketState = s  # type: ignore[assignment]
        if cost:
            time = now // self.tick
            if time < state.time:
                time = state.time
            return (time - (used + cost * self.part) // -self.n) * self.tick
        return self.drained_at(state, now, used) if used else now

    def drained_at(self, state: BucketState, now: int, parts: int) -> int:
        """Return when so many parts will have drained away, if nothing is written.

        The state keeps its shape then, and is fresh as soon as it is so in one of the two.
        """
        time = now // self.tick
        if time < state.time:
            time = state.time
        drained = (time - parts // -self.n) * self.tick
        fresh = self.fresh_at(state)
        return min(fresh, drained)

    def refund(self, s: MeterState, receipt: Receipt, cost: int, now: int) -> None:
        state: BucketState = s  # type: ignore[assignment]
        birth, before, at, refunded_before, time_before, n, part, most, held = receipt
        if state.birth != birth or state.n != n or state.part != part or state.most != most:
            return
        level, time, refunded = state.level, state.time, state.refunded
        now = now // self.tick
        if now < time:
            now = time
        if now - time >= -(level // -n):
            self.clear(state)
            return
        left = level - n * (now - time)
        if cost > held:
            cost = held
        # What has drained since came first out of what was there before the hold and has not been given back since, then
        # out of the units that stay charged, and only then out of those that are given back.
        kept = before - (refunded - refunded_before)
        kept = (max(0, kept)) + (held - cost) * part
        back = cost * part
        passed = now - at
        if passed > (kept + back) // n:
            back = 0
        elif passed > kept // n:
            back -= n * passed - kept
        if back >= left:
            self.clear(state)
            return
        if cost == held and level == before + held * part and time == at and refunded == refunded_before:
            # Nothing has happened since the hold: back to the state before it.
            state.level = before + n * (at - time_before)
            state.time = time_before
            return
        refunded += back
        if refunded > MAX_UNITS:
            birth = (birth + 1) % MAX_UNITS
            refunded = 0
        state.birth = birth
        state.level = level - back
        state.refunded = refunded

    def fresh_at(self, s: MeterState) -> int:
        state: BucketState = s  # type: ignore[assignment]
        return (state.time - state.level // -state.n) * self.tick

    def as_tuple(self, s: MeterState) -> State | None:
        state: BucketState = s  # type: ignore[assignment]
        if not state.birth:
            return None
        shape = (state.n, state.part, state.most // state.part)
        return state.birth, state.level, state.time, state.refunded, *shape


class ClosedMeter(BucketMeter):
    """A token bucket with a limit of 0, in which nothing is ever counted."""

    __slots__ = ()

    def __init__(self, name: str, tick: int) -> None:
        super().__init__(name, 0, 1, 1, tick)

    def used(self, s: MeterState, now: int) -> int:
        return 0

    def charge(self, s: MeterState, now: int, used: int, cost: int, birth: int) -> int:
        return NEVER

    def free_at(self, s: MeterState, now: int, excess: int) -> int:
        return NEVER

    def empty_at(self, s: MeterState, now: int, used: int, cost: int) -> int:
        return NEVER

    def check_countable(self, used: int, cost: int) -> None:
        return


def converted(level: int, part: int, old_part: int) -> int:
    """Return a level in other parts, rounded up; the product may have 88 bits, so these are numbers of Python's own."""
    return min(-(level * part // -old_part), _MAX_UNITS)


def meter_for(rule: Rule, quota: Quota | None = None) -> Meter:
    """Return what counts for a rule, with its own quota or the given one (that of a tier).

    Raises:
        ConfigError: The quota cannot be counted exactly by this rule.
    """
    match algorithm_for(rule, quota):
        case FixedWindow(name, limit, period):
            return FixedMeter(name, limit, period)
        case SlidingWindow(name, limit, width, lifetime):
            return SlidingMeter(name, limit, width, lifetime)
        case TokenBucket(name, _, 0, _, tick):
            return ClosedMeter(name, tick)
        case TokenBucket(name, burst, n, d, tick):
            return BucketMeter(name, burst, n, d, tick)
    raise AssertionError(f"no meter for {rule!r}")
