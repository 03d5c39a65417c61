"""How the memory store keeps busy keys small and quick.

A state that nobody holds units of (its birth is 0), in the shape that its table began with, is packed into one object:

    fixed window     one int: windows since the table began << 31 | units
    token bucket     one int: what will have drained when it is empty << 60 | time, both since the machine's start
    sliding window   one bytes of 64-bit integers: expiry of the oldest bucket, newest index, total, newest units,
                     then index and units of the buckets before, oldest first

`quick_hit` returns the shortest way through `Limiter.hit` for one unscoped rule: it decides on the packed object itself, and
hands everything out of the ordinary (another tier, a time of the caller's own, held units, a full store, a clock that went
back, bad arguments) to the general way. It can be called as a gate's hit is and as `Limiter.hit` is, which saves a call. The
lock is `headgate.stores.exclusive`, written out. A value that is not packed fails in the first comparison, and so takes the
general way without having been looked at. The replay property holds both ways to the same answers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

from headgate.algorithms import Algorithm, FixedWindow, SlidingWindow, State, TokenBucket
from headgate.clock import Clock, SteadyClock, instant
from headgate.decision import Decision
from headgate.keys import Key
from headgate.stores.exclusive import Free, wait_for

if TYPE_CHECKING:
    from headgate.stores.memory import Table

Packed = int | bytes
Hit = Callable[[Key | None, int, str | None, int | None], Decision]
QuickHit = Callable[..., Decision]
"""Takes what a gate's hit takes, in its order, and what `Limiter.hit` takes, by name."""

# Small numbers are quick. So windows are counted from the first one of a table, and times from the machine's start.
_BITS = 31
_STRIDE: int = 2**_BITS
"""From one window to the next; one that counts as much is not packed."""

_TIME_BITS = 60  # 36,000 years of microseconds, and two of the digits that Python counts in
_TIME: int = 2**_TIME_BITS - 1


class Packing(Protocol):
    """How the states of one table are packed."""

    @property
    def algorithm(self) -> Algorithm:
        """What the table began with."""

    def pack(self, state: State) -> Packed | State:
        """Return the packed state, or the state itself if it is out of the ordinary."""

    def unpack(self, packed: Packed) -> State:
        """Return the state that was packed."""

    def fresh_at(self, value: Packed | State) -> int:
        """Return the first time at which a state, packed or not, equals a fresh one."""

    def quick_hit(
        self, algorithm: Algorithm, table: Table, free: Free, clock: Clock, general: Hit
    ) -> QuickHit | None:
        """Return a hit on one unscoped rule that answers like the general one; `None` if there is no quicker one."""


def packing_for(algorithm: Algorithm, clock: Clock) -> Packing:
    """Return how states of this algorithm are packed."""
    if isinstance(algorithm, FixedWindow):
        return FixedWindowPacking(algorithm, clock)
    if isinstance(algorithm, TokenBucket) and algorithm.n and type(clock) is SteadyClock:
        return TokenBucketPacking(algorithm, clock)
    if isinstance(algorithm, SlidingWindow) and algorithm.width > 1:
        return SlidingWindowPacking(algorithm)
    return NoPacking(algorithm)


class NoPacking:
    """Keeps states as they are: those of a log are as large as its limit anyway."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm

    def pack(self, state: State) -> Packed | State:
        return state

    def unpack(self, packed: Packed) -> State:
        raise AssertionError("nothing was packed")

    def fresh_at(self, value: Packed | State) -> int:
        return self.algorithm.fresh_at(value)  # type: ignore[arg-type]  # never packed

    def quick_hit(
        self, algorithm: Algorithm, table: Table, free: Free, clock: Clock, general: Hit
    ) -> QuickHit | None:
        return None


class FixedWindowPacking:
    """One int per key."""

    def __init__(self, algorithm: FixedWindow, clock: Clock) -> None:
        self.algorithm = algorithm
        self._first = clock.now_us() // algorithm.period

    def pack(self, state: State) -> Packed | State:
        birth, index, count = state
        return state if birth or count >= _STRIDE else (index - self._first << _BITS) + count

    def unpack(self, packed: Packed) -> State:
        assert isinstance(packed, int)
        return 0, (packed >> _BITS) + self._first, packed % _STRIDE

    def fresh_at(self, value: Packed | State) -> int:
        index: int = (value >> _BITS) + self._first if isinstance(value, int) else value[1]
        return (index + 1) * self.algorithm.period

    def quick_hit(
        self, algorithm: Algorithm, table: Table, free: Free, clock: Clock, general: Hit
    ) -> QuickHit | None:
        assert isinstance(algorithm, FixedWindow)
        limit, period, names = algorithm.limit, algorithm.period, (algorithm.name,)
        if limit >= _STRIDE:
            return None
        first = self._first
        values = cast(dict[Any, Any], table.values)
        get, begin = values.get, table.begin
        monotonic_ns, epoch = _ticker(clock)
        one = 1
        start = end = base = full = 0  # of the present window

        def hit(
            key: Any = None,
            cost: int = 1,
            tier: str | None = None,
            now_us: int | None = None,
            *,
            now: float | None = None,
        ) -> Decision:
            nonlocal start, end, base, full
            if tier is None and now_us is None and now is None and (cost is one or _is_whole(cost, limit)):
                try:
                    del free[0]
                except KeyError:
                    wait_for(free)
                try:
                    at = monotonic_ns() // 1000
                    if not start <= at < end:
                        index = (at + epoch) // period
                        start, end = index * period - epoch, (index + 1) * period - epoch
                        base = index - first << _BITS
                        full = base + limit
                    count: Any = get(key)
                    if count is None and begin(key, at + epoch):
                        count = base
                    if count < base:
                        count = base  # of an earlier window
                    after = count + cost
                    if after <= full:
                        values[key] = after
                        return Decision((True, limit, full - after, None, end - at, names, 0, None, False))
                    if count < base + _STRIDE:  # more is of a later window: the clock went back
                        left = full - count if count < full else 0
                        return Decision((False, limit, left, end - at, end - at, names, 0, None, False))
                except TypeError:
                    pass  # a key that cannot be looked up, or a state that is not packed
                finally:
                    free[0] = None
            return general(key, cost, tier, now_us if now is None else instant(now))

        return hit


class TokenBucketPacking:
    """One int per key, which says when the bucket will be empty: if that has passed, nothing is left to calculate.

    Time is counted in parts, of which `n` drain per tick. Only on the steady clock, which never goes back.
    """

    def __init__(self, algorithm: TokenBucket, clock: SteadyClock) -> None:
        self.algorithm = algorithm
        self._shape = (0, algorithm.n, algorithm.d, algorithm.burst)
        self._epoch = clock.epoch_us // algorithm.tick

    def pack(self, state: State) -> Packed | State:
        birth, level, time, *rest = state
        time -= self._epoch
        if birth or tuple(rest) != self._shape or not 0 <= time <= _TIME:
            return state
        return time * self.algorithm.n + level << _TIME_BITS | time

    def unpack(self, packed: Packed) -> State:
        assert isinstance(packed, int)
        time = packed & _TIME
        return 0, (packed >> _TIME_BITS) - time * self.algorithm.n, time + self._epoch, *self._shape

    def fresh_at(self, value: Packed | State) -> int:
        if isinstance(value, int):
            return (self._epoch - (value >> _TIME_BITS) // -self.algorithm.n) * self.algorithm.tick
        return self.algorithm.fresh_at(value)  # type: ignore[arg-type]  # else a state

    def quick_hit(
        self, algorithm: Algorithm, table: Table, free: Free, clock: Clock, general: Hit
    ) -> QuickHit | None:
        assert isinstance(algorithm, TokenBucket)
        n, d, tick, burst = algorithm.n, algorithm.d, algorithm.tick, algorithm.burst
        if (0, n, d, burst) != self._shape:
            return None  # the limit was changed while states of the old one are about
        capacity, up, names = burst * d, n - 1, (algorithm.name,)
        fine = tick == 1
        even = fine and n == 1  # as of most quotas: then there is hardly anything to calculate
        values = cast(dict[Any, Any], table.values)
        get, begin = values.get, table.begin
        monotonic_ns, epoch = _ticker(clock)
        one = 1

        def hit(
            key: Any = None,
            cost: int = 1,
            tier: str | None = None,
            now_us: int | None = None,
            *,
            now: float | None = None,
        ) -> Decision:
            if tier is None and now_us is None and now is None and (cost is one or _is_whole(cost, burst)):
                try:
                    del free[0]
                except KeyError:
                    wait_for(free)
                try:
                    at = monotonic_ns() // 1000
                    time = at if fine else at // tick
                    drained = time if even else time * n
                    packed: Any = get(key)
                    if packed is None and begin(key, at + epoch):
                        packed = 0
                    empty = packed >> _TIME_BITS
                    if empty < drained:
                        empty = drained
                    after = empty + (d if cost is one else cost * d)
                    level = after - drained
                    if level <= capacity:
                        values[key] = after << _TIME_BITS | time
                        reset_after = (
                            level if even else (level + up) // n if fine else (after + up) // n * tick - at
                        )
                        left = (capacity - level) // d
                        return Decision((True, burst, left, None, reset_after, names, 0, None, False))
                    if even:
                        retry_after, reset_after = level - capacity, empty - at
                    else:
                        retry_after = (after - capacity + up) // n * tick - at
                        reset_after = (empty + up) // n * tick - at
                    room = capacity - empty + drained
                    left = room // d if room > 0 else 0
                    return Decision((False, burst, left, retry_after, reset_after, names, 0, None, False))
                except TypeError:
                    pass  # a key that cannot be looked up, or a state that is not packed
                finally:
                    free[0] = None
            return general(key, cost, tier, now_us if now is None else instant(now))

        return hit


class SlidingWindowPacking:
    """One bytes per key: the garbage collector does not look at those, as it does at arrays and lists."""

    def __init__(self, algorithm: SlidingWindow) -> None:
        self.algorithm = algorithm

    def pack(self, state: State) -> Packed | State:
        birth, *buckets = state
        if birth:
            return state
        expiry = buckets[0] * self.algorithm.width + self.algorithm.lifetime
        *before, newest, units = buckets
        return struct.pack(f"={4 + len(before)}q", expiry, newest, sum(buckets[1::2]), units, *before)

    def unpack(self, packed: Packed) -> State:
        assert isinstance(packed, bytes)
        _, newest, _, units, *before = struct.unpack(f"={len(packed) // 8}q", packed)
        return 0, *before, newest, units

    def fresh_at(self, value: Packed | State) -> int:
        newest: int = _HEAD.unpack_from(value)[1] if isinstance(value, bytes) else value[-2]  # type: ignore[index]  # else a state
        return newest * self.algorithm.width + self.algorithm.lifetime

    def quick_hit(
        self, algorithm: Algorithm, table: Table, free: Free, clock: Clock, general: Hit
    ) -> QuickHit | None:
        assert isinstance(algorithm, SlidingWindow)
        limit, names = algorithm.limit, (algorithm.name,)
        width, lifetime = algorithm.width, algorithm.lifetime
        values = cast(dict[Any, Any], table.values)
        get, begin = values.get, table.begin
        monotonic_ns, epoch = _ticker(clock)
        one = 1
        read_head, new_head = _HEAD.unpack_from, _HEAD.pack
        read_bucket, new_bucket = _BUCKET.unpack_from, _BUCKET.pack
        beginning = _HEAD.size

        def hit(
            key: Any = None,
            cost: int = 1,
            tier: str | None = None,
            now_us: int | None = None,
            *,
            now: float | None = None,
        ) -> Decision:
            if tier is None and now_us is None and now is None and (cost is one or _is_whole(cost, limit)):
                try:
                    del free[0]
                except KeyError:
                    wait_for(free)
                try:
                    at = monotonic_ns() // 1000 + epoch
                    index = at // width
                    buckets: Any = get(key)
                    if buckets is None and begin(key, at):
                        expiry = index * width + lifetime
                        values[key] = new_head(expiry, index, cost, cost)
                        return Decision((True, limit, limit - cost, None, expiry - at, names, 0, None, False))
                    expiry, newest, total, units = read_head(buckets)
                    first = beginning
                    if expiry <= at:
                        first, expiry, total = _without_dead(buckets, at, width, lifetime)
                    after = total + cost
                    if newest > index:
                        pass  # the clock went back
                    elif after <= limit:
                        if newest == index:
                            values[key] = new_head(expiry, index, after, units + cost) + buckets[first:]
                        elif total:
                            before = buckets[first:] + new_bucket(newest, units)
                            values[key] = new_head(expiry, index, after, cost) + before
                        else:
                            values[key] = new_head(index * width + lifetime, index, cost, cost)
                        reset_after = index * width + lifetime - at
                        return Decision(
                            (True, limit, limit - after, None, reset_after, names, 0, None, False)
                        )
                    else:
                        count = read_bucket(buckets, first)[1] if first < len(buckets) else units
                        if after - limit <= count:  # the oldest bucket frees enough
                            left = limit - total if total < limit else 0
                            reset_after = newest * width + lifetime - at
                            return Decision(
                                (False, limit, left, expiry - at, reset_after, names, 0, None, False)
                            )
                except TypeError:
                    pass  # a key that cannot be looked up, or a state that is not packed
                finally:
                    free[0] = None
            return general(key, cost, tier, now_us if now is None else instant(now))

        return hit


_HEAD = struct.Struct("=4q")  # expiry of the oldest bucket, newest index, total, newest units
_BUCKET = struct.Struct("=2q")  # index, units


def _is_whole(cost: Any, most: int) -> bool:
    """Return whether the quick way can charge a cost; any other is for the general way to judge.

    That a 1 is usually *the* 1 spares most calls this one; 1.0 and True are not.
    """
    return cost.__class__ is int and 0 < cost <= most


def _without_dead(buckets: bytes, at: int, width: int, lifetime: int) -> tuple[int, int, int]:
    """Return where the first live bucket before the newest stands, the expiry of the oldest live one, and the total."""
    _, newest, total, _ = _HEAD.unpack_from(buckets)
    first = _HEAD.size
    while first < len(buckets):
        index, units = _BUCKET.unpack_from(buckets, first)
        expiry: int = index * width + lifetime
        if expiry > at:
            return first, expiry, total
        total -= units
        first += _BUCKET.size
    expiry = newest * width + lifetime
    return first, expiry, total if expiry > at else 0


def _ticker(clock: Clock) -> tuple[Callable[[], int], int]:
    """Return a function and what to add to its microseconds for those of the epoch: a call less for the usual clock."""
    if type(clock) is SteadyClock:
        return clock.monotonic_ns, clock.epoch_us
    return (lambda: clock.now_us() * 1000), 0
