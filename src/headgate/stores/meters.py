"""Meters: the algorithms of the memory store, with mutable states.

`headgate.algorithms` explains each rule and is the reference; a meter gives the same results without creating a new state
for every call. Checking and charging are separate steps, so that several rules can be checked before any of them is charged.

A unit consists of `part` parts, and at most `most` parts may be in use: token buckets need fractions, windows count units.

This file is also compiled, with the types in `meters.pxd`. So every number, also every intermediate result, stays below
2^63: if a product could exceed it, the division comes first. A signal handler may raise at any call in Python, so there is
no call between the first and the last assignment to a state.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left

from headgate.algorithms import (
    MAX_ENTRIES,
    Algorithm,
    Calendar,
    Concurrent,
    FixedWindow,
    Penalty,
    Receipt,
    SlidingWindow,
    State,
    TokenBucket,
)
from headgate.calendars import edges_around
from headgate.decision import Verdict
from headgate.errors import CostTooHigh
from headgate.quota import MAX_UNITS as _MAX_UNITS

MAX_UNITS: int = _MAX_UNITS
NEVER: int = -(2**62)
"""A time that is never reached."""


class MeterState:
    """The count of one key and rule; empty if the birth is 0."""

    __slots__ = ("birth",)

    def __init__(self) -> None:
        self.birth: int = 0


class Meter:
    """A rule with one quota.

    Attributes:
        algorithm: The pure functions of the same rule, for rare operations.
    """

    __slots__ = ("algorithm", "limit", "most", "name", "part")

    def __init__(self, algorithm: Algorithm, part: int = 1) -> None:
        self.algorithm = algorithm
        self.name: str = algorithm.name
        self.limit: int = algorithm.capacity
        self.part: int = part
        self.most: int = self.limit * part

    def new(self) -> MeterState:
        """Return an empty state."""
        raise NotImplementedError

    def clear(self, s: MeterState) -> None:
        """Make a state empty."""
        raise NotImplementedError

    def used(self, s: MeterState, now: int) -> int:
        """Return the parts in use; the call does not affect later results."""
        raise NotImplementedError

    def charge(self, s: MeterState, now: int, used: int, cost: int, birth: int) -> int:
        """Add units to the result of `used`, and return the time at which the count will be 0."""
        raise NotImplementedError

    def receipt(self, s: MeterState, now: int, used: int, cost: int, birth: int) -> Receipt:
        """Return the receipt of a charge with the same arguments; called before the charge."""
        raise NotImplementedError

    def free_at(self, s: MeterState, now: int, excess: int) -> int:
        """Return the time at which `excess` parts will be free; `NEVER` if they will not."""
        raise NotImplementedError

    def empty_at(self, s: MeterState, now: int, used: int, cost: int) -> int:
        """Return the time at which the count would be 0 after a charge of `cost`."""
        raise NotImplementedError

    def decide_move(self, s: MeterState, receipt: Receipt, now: int, cost: int) -> Verdict:
        """Return the verdict on replacing the units of a receipt."""
        return self.algorithm.move(self.as_tuple(s), receipt, now, cost, 0)[1]

    def move(self, s: MeterState, receipt: Receipt, now: int, cost: int, birth: int) -> Receipt:
        """Replace the units of a receipt after `decide_move` admitted it, and return the new receipt.

        New units are charged before the old ones are given back, in case a signal handler raises in between.
        """
        before = self.as_tuple(s)
        after, _ = self.algorithm.move(before, receipt, now, cost, birth)
        if after is None:
            self.clear(s)
            return ()
        taken = self.algorithm.receipt(before, after, cost) if cost else ()
        self.load(s, after)
        return taken

    def refund(self, s: MeterState, receipt: Receipt, cost: int, now: int) -> None:
        """Give back up to `cost` of the receipt's units, as far as they still count."""
        raise NotImplementedError

    def fresh_at(self, s: MeterState) -> int:
        """Return the first time at which the state equals a new one."""
        raise NotImplementedError

    def as_tuple(self, s: MeterState) -> State | None:
        """Return the state in the form of the pure functions."""
        raise NotImplementedError

    def load(self, s: MeterState, numbers: State) -> None:
        """Set a state from the form of the pure functions; only needed if `move` is not overridden."""
        raise NotImplementedError

    def check_countable(self, used: int, cost: int) -> None:
        """Refuse a cost that would take the count above `MAX_UNITS`."""
        if used > MAX_UNITS or cost > (MAX_UNITS - used) // self.part:
            raise CostTooHigh(cost, max(0, MAX_UNITS - used) // self.part, self.name)


class WindowState(MeterState):
    """The end of a window, and the units in it."""

    __slots__ = ("count", "end")

    def __init__(self) -> None:
        self.birth = 0
        self.end: int = 0
        self.count: int = 0


class WindowMeter(Meter):
    """Units in the window that contains `now`, or in a later window if that has counts already."""

    __slots__ = ()

    def ends(self, now: int) -> int:
        """Return the end of the window that contains a time."""
        raise NotImplementedError

    def number(self, end: int) -> int:
        """Return the number of the window with this end, as in the pure functions."""
        raise NotImplementedError

    def end_of(self, number: int) -> int:
        """Return the end of the window with this number."""
        raise NotImplementedError

    def new(self) -> MeterState:
        return WindowState()

    def clear(self, s: MeterState) -> None:
        state: WindowState = s  # type: ignore[assignment]  # each meter gets states of its class
        state.birth = 0
        state.end = 0
        state.count = 0

    def used(self, s: MeterState, now: int) -> int:
        state: WindowState = s  # type: ignore[assignment]
        return state.count if state.end > now else 0

    def charge(self, s: MeterState, now: int, used: int, cost: int, birth: int) -> int:
        state: WindowState = s  # type: ignore[assignment]
        if not used:
            end = self.ends(now)
            state.birth = birth
            state.end = end
        state.count = used + cost
        return state.end

    def receipt(self, s: MeterState, now: int, used: int, cost: int, birth: int) -> Receipt:
        state: WindowState = s  # type: ignore[assignment]
        if used:
            return state.birth, self.number(state.end), cost
        return birth, self.number(self.ends(now)), cost

    def free_at(self, s: MeterState, now: int, excess: int) -> int:
        state: WindowState = s  # type: ignore[assignment]
        if not self.limit:
            return NEVER
        return state.end if state.end > now else self.ends(now)

    def empty_at(self, s: MeterState, now: int, used: int, cost: int) -> int:
        state: WindowState = s  # type: ignore[assignment]
        if used:
            return state.end
        return self.ends(now) if cost else now

    def refund(self, s: MeterState, receipt: Receipt, cost: int, now: int) -> None:
        state: WindowState = s  # type: ignore[assignment]
        birth, number, held = receipt
        if state.birth == birth and state.end == self.end_of(number):
            count = state.count - (min(held, cost))
            if count > 0:
                state.count = count
            else:
                self.clear(state)

    def fresh_at(self, s: MeterState) -> int:
        state: WindowState = s  # type: ignore[assignment]
        return state.end

    def as_tuple(self, s: MeterState) -> State | None:
        state: WindowState = s  # type: ignore[assignment]
        return (state.birth, self.number(state.end), state.count) if state.birth else None

    def load(self, s: MeterState, numbers: State) -> None:
        state: WindowState = s  # type: ignore[assignment]
        birth, number, count = numbers
        end = self.end_of(number)
        state.birth = birth
        state.end = end
        state.count = count


class FixedMeter(WindowMeter):
    """Windows of a fixed length, aligned to the epoch."""

    __slots__ = ("period",)

    def __init__(self, rule: FixedWindow) -> None:
        super().__init__(rule)
        self.period: int = rule.period

    def ends(self, now: int) -> int:
        return (now // self.period + 1) * self.period

    def number(self, end: int) -> int:
        return end // self.period - 1

    def end_of(self, number: int) -> int:
        return (number + 1) * self.period


class CalendarMeter(WindowMeter):
    """Days, weeks, months or years of a time zone, with a cache of the last window."""

    __slots__ = ("end", "start")

    def __init__(self, rule: Calendar) -> None:
        super().__init__(rule)
        self.start: int = 0
        self.end: int = 0

    def ends(self, now: int) -> int:
        if not self.start <= now < self.end:
            rule: Calendar = self.algorithm  # type: ignore[assignment]
            _, start, end, _ = edges_around(rule.span, rule.timezone, now)
            self.start = start
            self.end = end
        return self.end

    def number(self, end: int) -> int:
        return end

    def end_of(self, number: int) -> int:
        return number


class ConcurrentState(MeterState):
    """The leases of a key.

    `leases` has end, order, number and units of each lease, sorted; no two have the same order. `by_number` is an index;
    it may still contain dropped leases. At the last check the first `ended` leases had ended; `total` is the units of the
    others. `latest` is the latest time at which a lease began or was renewed.
    """

    __slots__ = ("by_number", "ended", "latest", "leases", "order", "total")

    def __init__(self) -> None:
        self.birth = 0
        self.latest: int = NEVER
        self.ended: int = 0
        self.total: int = 0
        self.order: int = 0
        self.leases: list[tuple[int, int, int, int]] = []
        self.by_number: dict[int, tuple[int, int, int, int]] = {}


class ConcurrentMeter(Meter):
    """Units of live leases."""

    __slots__ = ("lease",)

    def __init__(self, rule: Concurrent) -> None:
        super().__init__(rule)
        self.lease: int = rule.lease

    def new(self) -> MeterState:
        return ConcurrentState()

    def clear(self, s: MeterState) -> None:
        state: ConcurrentState = s  # type: ignore[assignment]
        state.birth = 0
        state.latest = NEVER
        state.ended = 0
        state.total = 0
        state.leases = []
        state.by_number = {}

    def used(self, s: MeterState, now: int) -> int:
        state: ConcurrentState = s  # type: ignore[assignment]
        leases, ended, total = state.leases, state.ended, state.total
        if now < state.latest:
            now = state.latest
        while ended < len(leases) and leases[ended][0] <= now:
            total -= leases[ended][3]
            ended += 1
        while ended > 0 and leases[ended - 1][0] > now:  # the clock went back
            ended -= 1
            total += leases[ended][3]
        state.ended = ended
        state.total = total
        return total

    def charge(self, s: MeterState, now: int, used: int, cost: int, birth: int) -> int:
        state: ConcurrentState = s  # type: ignore[assignment]
        time = max(now, state.latest)
        order = state.order + 1
        lease = (time + self.lease, order, birth, cost)
        if not used:
            leases, by_number = [lease], {birth: lease}
            state.birth = birth
            state.latest = time
            state.ended = 0
            state.total = cost
            state.order = order
            state.leases = leases
            state.by_number = by_number
            return lease[0]
        self.drop(state)
        place = bisect_left(state.leases, lease)
        state.by_number[birth] = lease  # first, in case the next line raises MemoryError
        state.leases[place:place] = [lease]
        state.latest = time
        state.total += cost
        state.order = order
        return state.leases[-1][0]

    def drop(self, state: ConcurrentState) -> None:
        """Drop ended leases."""
        if state.ended:
            dropped = state.leases[: state.ended]
            del state.leases[: state.ended]
            state.ended = 0
            for lease in dropped:
                state.by_number.pop(lease[2], None)

    def find(self, state: ConcurrentState, receipt: Receipt) -> int:
        """Return the index of a receipt's lease; -1 if it is not there."""
        birth, number, _ = receipt
        lease = state.by_number.get(number) if state.birth == birth else None
        if lease is None:
            return -1
        place = bisect_left(state.leases, lease)
        return place if place < len(state.leases) and state.leases[place] is lease else -1

    def receipt(self, s: MeterState, now: int, used: int, cost: int, birth: int) -> Receipt:
        return s.birth if used else birth, birth, cost

    def free_at(self, s: MeterState, now: int, excess: int) -> int:
        state: ConcurrentState = s  # type: ignore[assignment]
        if not self.limit:
            return NEVER
        place = state.ended
        excess -= state.leases[place][3]
        while excess > 0:
            place += 1
            excess -= state.leases[place][3]
        return state.leases[place][0]

    def empty_at(self, s: MeterState, now: int, used: int, cost: int) -> int:
        state: ConcurrentState = s  # type: ignore[assignment]
        last = state.leases[-1][0] if used else now
        return max(last, max(now, state.latest) + self.lease) if cost else last

    def decide_move(self, s: MeterState, receipt: Receipt, now: int, cost: int) -> Verdict:
        state: ConcurrentState = s  # type: ignore[assignment]
        used, leases = self.used(state, now), state.leases
        place = self.find(state, receipt)
        is_live = place >= state.ended and place >= 0
        last = leases[-1][0] if used else now
        if cost:
            if is_live:
                last = max(last, max(now, state.latest) + self.lease)
            return Verdict(is_live, self.limit, max(0, self.limit - used), None, last - now)
        if is_live:
            used -= leases[place][3]
            last = now if not used else leases[-2][0] if place == len(leases) - 1 else last
        return Verdict(True, self.limit, max(0, self.limit - used), None, last - now)

    def move(self, s: MeterState, receipt: Receipt, now: int, cost: int, birth: int) -> Receipt:
        state: ConcurrentState = s  # type: ignore[assignment]
        if not cost:
            self.refund(state, receipt, receipt[2], now)
            return ()
        self.used(state, now)
        self.drop(state)
        place = self.find(state, receipt)
        end, _, number, units = state.leases[place]
        time = max(now, state.latest)
        order = state.order + 1
        renewed = (max(end, time + self.lease), order, number, units)
        after = bisect_left(state.leases, renewed)
        state.leases[after:after] = [renewed]
        state.by_number[number] = renewed
        del state.leases[place]
        state.latest = time
        state.order = order
        return receipt

    def refund(self, s: MeterState, receipt: Receipt, cost: int, now: int) -> None:
        state: ConcurrentState = s  # type: ignore[assignment]
        place = self.find(state, receipt)
        if place < 0:
            return
        end, order, number, units = state.leases[place]
        back = min(cost, receipt[2], units)
        is_live = place >= state.ended
        if back < units:
            kept = (end, order, number, units - back)
            state.leases[place] = kept
            state.by_number[number] = kept
        elif len(state.leases) == 1:
            self.clear(state)
            return
        else:
            del state.leases[place]
            del state.by_number[number]
            if not is_live:
                state.ended -= 1
        if is_live:
            state.total -= back

    def fresh_at(self, s: MeterState) -> int:
        state: ConcurrentState = s  # type: ignore[assignment]
        return state.leases[-1][0] if state.leases else 0

    def as_tuple(self, s: MeterState) -> State | None:
        state: ConcurrentState = s  # type: ignore[assignment]
        if not state.birth:
            return None
        numbers = [number for end, _, number, units in state.leases for number in (end, number, units)]
        return state.birth, state.latest, *numbers


class SlidingState(MeterState):
    """The newest bucket and older ones.

    `older` has index and units of each bucket, oldest first. Buckets before the place `first` are dropped; buckets before
    `live` had expired at the last check; `total` is the units of all live buckets, including the newest. This is valid up to
    the time `until`, when the oldest live bucket expires. `until` is `NEVER` if a check is needed: the time is unknown, or
    an expired bucket would count again if the clock went back.
    """

    __slots__ = ("first", "live", "newest", "older", "total", "units", "until")

    def __init__(self) -> None:
        self.birth = 0
        self.newest: int = -1
        self.units: int = 0
        self.total: int = 0
        self.first: int = 0
        self.live: int = 0
        self.until: int = NEVER
        self.older: array[int] | None = None


class SlidingMeter(Meter):
    """Units in live buckets; the buckets of a log are a microsecond wide."""

    __slots__ = ("full", "lifetime", "width")

    def __init__(self, rule: SlidingWindow) -> None:
        super().__init__(rule)
        self.width: int = rule.width
        self.lifetime: int = rule.lifetime
        # Length of `older` in a full log.
        self.full: int = 2 * max(MAX_ENTRIES, rule.limit) - 2 if rule.width == 1 else MAX_UNITS

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
        state.until = NEVER
        state.older = None

    def used(self, s: MeterState, now: int) -> int:
        state: SlidingState = s  # type: ignore[assignment]
        if now >= state.until:
            now = max(now, state.newest * self.width)
            if not state.units or now >= state.newest * self.width + self.lifetime:
                return 0
            self.look(state, now)
        return state.total

    def look(self, state: SlidingState, now: int) -> None:
        """Move the boundary between expired and live buckets."""
        older, oldest = state.older, state.newest
        live, total = state.live, state.total
        if older is not None:
            dead, size = (now - self.lifetime) // self.width, len(older)
            while live < size:
                index = older[live]
                if index > dead:
                    oldest = index
                    break
                units = older[live + 1]
                total -= units
                live += 2
            while live > state.first:  # if the clock went back
                index = older[live - 2]
                if index <= dead:
                    break
                oldest = index
                live -= 2
                units = older[live + 1]
                total += units
        state.live = live
        state.until = oldest * self.width + self.lifetime if live == state.first else NEVER
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
            state.until = index * self.width + self.lifetime
            state.older = None
            return state.until
        if state.first != state.live:
            self.drop(state)
        if index <= state.newest:
            state.units += cost
            state.total += cost
            return state.newest * self.width + self.lifetime
        older = array("q") if state.older is None else state.older
        if len(older) - state.first >= self.full:
            state.newest = index
            state.units += cost
            state.total += cost
            return index + self.lifetime
        before = (state.newest, state.units)
        state.older = older
        state.newest = index
        state.units = cost
        state.total += cost
        # Last: if it raises, the total keeps the units of that bucket until all others have expired.
        older.extend(before)
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
        if older is None or (excess == 1 and state.until != NEVER):
            return state.until  # no live bucket is without a unit
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

    def find_older(self, state: SlidingState, index: int) -> int:
        """Return the place of an older bucket; -1 if it does not exist."""
        older = state.older
        if older is None:
            return -1
        low, high = state.first // 2, len(older) // 2
        while low < high:
            middle = (low + high) // 2
            if older[2 * middle] < index:
                low = middle + 1
            else:
                high = middle
        place = 2 * low
        return place if place < len(older) and older[place] == index else -1

    def counted(self, state: SlidingState, receipt: Receipt) -> int:
        """Return the number of a receipt's units in the total."""
        birth, index, held = receipt
        if state.birth != birth:
            return 0
        units = 0
        if index == state.newest:
            units = state.units
        else:
            older, place = state.older, self.find_older(state, index)
            if older is not None and place >= state.live and place >= 0:
                units = older[place + 1]
        return min(held, units)

    def decide_move(self, s: MeterState, receipt: Receipt, now: int, cost: int) -> Verdict:
        state: SlidingState = s  # type: ignore[assignment]
        time = max(now, state.newest * self.width)
        used = self.used(state, time)
        back = self.counted(state, receipt) if used else 0
        count, newest, index = used - back, state.newest, receipt[1]
        if cost and count + cost > self.limit:
            excess = count + cost - self.limit
            free_at = self.free_at(state, time, excess)
            if back and free_at >= index * self.width + self.lifetime:
                free_at = self.free_at(state, time, excess + back)
            reset_after = newest * self.width + self.lifetime - now if used else 0
            retry_after = free_at - now if self.limit else None
            return Verdict(False, self.limit, max(0, self.limit - used), retry_after, reset_after)
        if cost:
            newest = time // self.width
        elif count and index == newest and back == state.units:
            older = state.older
            assert older is not None
            newest = older[-2]
        reset_after = newest * self.width + self.lifetime - now if count or cost else 0
        return Verdict(True, self.limit, max(0, self.limit - count - cost), None, reset_after)

    def move(self, s: MeterState, receipt: Receipt, now: int, cost: int, birth: int) -> Receipt:
        state: SlidingState = s  # type: ignore[assignment]
        time = max(now, state.newest * self.width)
        if not cost:
            self.refund(state, receipt, receipt[2], time)
            return ()
        used = self.used(state, time)
        back = self.counted(state, receipt) if used else 0
        if used == back:
            used = 0
        taken = self.receipt(state, time, used, cost, birth)
        self.charge(state, time, used, cost, birth)
        if used:
            self.refund(state, receipt, back, time)
        return taken

    def refund_older(self, state: SlidingState, index: int, cost: int) -> None:
        """Give units of an older bucket back, if it still exists."""
        older, place = state.older, self.find_older(state, index)
        if older is None or place < 0:
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
            state.until = NEVER
            del older[place : place + 2]  # an empty bucket would make a log larger than its limit

    def forget_newest(self, state: SlidingState) -> None:
        """Remove the newest bucket; the one before it becomes the newest."""
        older = state.older
        size = 0 if older is None else len(older)
        if older is None or size <= state.first:
            self.clear(state)
            return
        total, live = state.total - state.units, state.live
        size -= 2
        newest, units = older[size], older[size + 1]
        if live > size:  # it has expired, so the total does not contain it
            live = size
            total += units
        state.newest = newest
        state.units = units
        state.total = total
        state.live = live
        state.until = NEVER
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
    """The level at a time in ticks, the total of refunds, and the shape of the level."""

    __slots__ = ("level", "refunded", "shape", "time")

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self.birth = 0
        self.level: int = 0
        self.time: int = 0
        self.refunded: int = 0
        self.shape = shape


class BucketMeter(Meter):
    """A level that drains by `n` parts per tick.

    Attributes:
        shape: `n`, `part` and `most`; a state with another shape was charged by another quota.
    """

    __slots__ = ("longest", "n", "shape", "tick")

    def __init__(self, rule: TokenBucket) -> None:
        super().__init__(rule, rule.d)
        self.n: int = rule.n or 1  # 1 for a limit of 0, so that a blank state is fresh
        self.tick: int = rule.tick
        self.longest: int = MAX_UNITS // self.n  # ticks in which the largest level drains
        self.shape: tuple[int, int, int] = (self.n, self.part, self.most)

    def new(self) -> MeterState:
        return BucketState(self.shape)

    def clear(self, s: MeterState) -> None:
        state: BucketState = s  # type: ignore[assignment]
        state.birth = 0
        state.level = 0
        state.time = 0
        state.refunded = 0

    def used(self, s: MeterState, now: int) -> int:
        state: BucketState = s  # type: ignore[assignment]
        level, passed = state.level, now // self.tick - state.time
        if state.shape is not self.shape:
            level = self.converted(state, max(0, passed))
            if level > MAX_UNITS:
                return level
        if passed <= 0:
            return level
        if passed > self.longest or (drained := passed * self.n) >= level:
            return 0
        return level - drained

    def converted(self, state: BucketState, passed: int) -> int:
        """Return the level of a state converted to this shape, after `passed` ticks; above `MAX_UNITS` if too large."""
        n, part, _ = state.shape
        if passed >= -(state.level // -n):
            return 0  # drained in its own shape: fresh for every caller
        return converted(state.level, self.part, part)

    def differs(self, state: BucketState) -> bool:
        """Return whether a state has another shape."""
        return state.shape is not self.shape and state.shape != self.shape

    def charge(self, s: MeterState, now: int, used: int, cost: int, birth: int) -> int:
        state: BucketState = s  # type: ignore[assignment]
        time, level = now // self.tick, used + cost * self.part
        if not used or (state.shape is not self.shape and self.differs(state)):
            state.birth = birth
            state.refunded = 0
            state.shape = self.shape
        if time < state.time:
            time = state.time
        state.time = time
        state.level = level
        return (time - level // -self.n) * self.tick

    def receipt(self, s: MeterState, now: int, used: int, cost: int, birth: int) -> Receipt:
        state: BucketState = s  # type: ignore[assignment]
        time = now // self.tick
        if time < state.time:
            time = state.time
        if not used or self.differs(state):
            return birth, used, time, 0, time, self.n, self.part, self.limit, cost
        return state.birth, used, time, state.refunded, state.time, self.n, self.part, self.limit, cost

    def free_at(self, s: MeterState, now: int, excess: int) -> int:
        state: BucketState = s  # type: ignore[assignment]
        time = now // self.tick
        if time < state.time:
            time = state.time
        drained = (time - excess // -self.n) * self.tick
        if state.shape is self.shape:
            return drained
        # Without a write the state keeps its shape. It is fresh as soon as it is fresh in one of the two shapes.
        fresh = self.fresh_at(state)
        if self.used(state, now) > MAX_UNITS:
            return fresh  # too large in this shape
        return min(drained, fresh)

    def empty_at(self, s: MeterState, now: int, used: int, cost: int) -> int:
        state: BucketState = s  # type: ignore[assignment]
        if not cost and not used:
            return now
        if not cost and state.shape is not self.shape:
            return self.free_at(s, now, used)
        time = now // self.tick
        if time < state.time:
            time = state.time
        return (time - (used + cost * self.part) // -self.n) * self.tick

    def refund(self, s: MeterState, receipt: Receipt, cost: int, now: int) -> None:
        state: BucketState = s  # type: ignore[assignment]
        birth, before, at, refunded_before, time_before, n, part, burst, held = receipt
        if state.birth != birth or state.shape != (n, part, burst * part):
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
        # Order of drainage since the hold: first units from before the hold that were not refunded since, then units that
        # stay charged, and last the units to give back.
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
            # The state has not changed since the hold: restore the state before it.
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
        n = self.n if state.shape is self.shape else state.shape[0]
        return (state.time - state.level // -n) * self.tick

    def as_tuple(self, s: MeterState) -> State | None:
        state: BucketState = s  # type: ignore[assignment]
        if not state.birth:
            return None
        n, part, most = state.shape
        return state.birth, state.level, state.time, state.refunded, n, part, most // part

    def load(self, s: MeterState, numbers: State) -> None:
        state: BucketState = s  # type: ignore[assignment]
        birth, level, time, refunded, n, part, burst = numbers
        shape = (n, part, burst * part)
        state.birth = birth
        state.level = level
        state.time = time
        state.refunded = refunded
        state.shape = shape


class ClosedMeter(BucketMeter):
    """A token bucket with a limit of 0, which never counts anything."""

    __slots__ = ()

    def __init__(self, rule: TokenBucket) -> None:
        super().__init__(rule)
        self.limit = 0
        self.most = 0
        self.shape = (1, self.part, 0)

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


class PenaltyState(MeterState):
    """The numbers of a penalty's state, as in the pure functions."""

    __slots__ = ("duration", "end", "refusals", "start")

    def __init__(self) -> None:
        self.birth = 0
        self.start: int = 0
        self.refusals: int = 0
        self.end: int = 0
        self.duration: int = 0


class PenaltyMeter(Meter):
    """Refusals by other rules; while a penalty is in force, all parts are in use."""

    __slots__ = ("period",)

    def __init__(self, rule: Penalty) -> None:
        super().__init__(rule)
        self.limit = rule.limit
        self.period: int = rule.duration

    def new(self) -> MeterState:
        return PenaltyState()

    def clear(self, s: MeterState) -> None:
        state: PenaltyState = s  # type: ignore[assignment]
        state.birth = 0
        state.start = 0
        state.refusals = 0
        state.end = 0
        state.duration = 0

    def used(self, s: MeterState, now: int) -> int:
        state: PenaltyState = s  # type: ignore[assignment]
        if state.end > now:
            return self.most
        return state.refusals if state.start + self.period > now else 0

    def count(self, s: MeterState, now: int, birth: int) -> None:
        """Count a refusal by another rule."""
        rule: Penalty = self.algorithm  # type: ignore[assignment]
        self.load(s, rule.count(self.as_tuple(s), now, birth))

    def free_at(self, s: MeterState, now: int, excess: int) -> int:
        state: PenaltyState = s  # type: ignore[assignment]
        return state.end

    def empty_at(self, s: MeterState, now: int, used: int, cost: int) -> int:
        return max(now, self.fresh_at(s))

    def refund(self, s: MeterState, receipt: Receipt, cost: int, now: int) -> None:
        return

    def check_countable(self, used: int, cost: int) -> None:
        return

    def fresh_at(self, s: MeterState) -> int:
        numbers = self.as_tuple(s)
        return 0 if numbers is None else self.algorithm.fresh_at(numbers)

    def as_tuple(self, s: MeterState) -> State | None:
        state: PenaltyState = s  # type: ignore[assignment]
        if not state.birth:
            return None
        return state.birth, state.start, state.refusals, state.end, state.duration

    def load(self, s: MeterState, numbers: State) -> None:
        state: PenaltyState = s  # type: ignore[assignment]
        birth, start, refusals, end, duration = numbers
        state.birth = birth
        state.start = start
        state.refusals = refusals
        state.end = end
        state.duration = duration


def converted(level: int, part: int, old_part: int) -> int:
    """Return a level in other parts, rounded up; above `MAX_UNITS` if too large.

    The product may have 88 bits, so this function uses Python integers.
    """
    return min(-(level * part // -old_part), _MAX_UNITS + 1)


def meter_for(algorithm: Algorithm) -> Meter:
    """Return the meter of an algorithm."""
    match algorithm:
        case FixedWindow():
            return FixedMeter(algorithm)
        case SlidingWindow():
            return SlidingMeter(algorithm)
        case TokenBucket(n=0):
            return ClosedMeter(algorithm)
        case TokenBucket():
            return BucketMeter(algorithm)
        case Calendar():
            return CalendarMeter(algorithm)
        case Concurrent():
            return ConcurrentMeter(algorithm)
        case Penalty():
            return PenaltyMeter(algorithm)
    raise AssertionError(f"no meter for {algorithm!r}")
