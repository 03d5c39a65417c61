"""How the memory store keeps busy keys small and quick.

A state that nobody holds units of (its birth is 0), in the shape that its table began with, is packed into one object:

    fixed window     one int: index << 53 | units
    token bucket     one int: time << 53 | level
    sliding window   one bytes of 64-bit integers: expiry of the oldest bucket, newest index, total,
                     then index and units of each live bucket, oldest first

`quick_hit` returns the shortest way through `Limiter.hit` for one unscoped rule: it decides on the packed object itself, and
hands everything out of the ordinary (another tier, a time of the caller's own, held units, a full store, a clock that went
back, bad arguments) to the general way. It can be called as a gate's hit is and as `Limiter.hit` is, which saves a call. The
lock is taken by `with`, although `acquire()` and `try` would be quicker: a signal handler that raises between those would
leave the store locked for ever. The replay property holds both ways to the same answers.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

from headgate.algorithms import Algorithm, FixedWindow, SlidingWindow, State, TokenBucket
from headgate.clock import Clock, SteadyClock, instant
from headgate.decision import Decision
from headgate.keys import Key

if TYPE_CHECKING:
    from headgate.stores.memory import Table

Packed = int | bytes
Hit = Callable[[Key | None, int, str | None, int | None], Decision]
QuickHit = Callable[..., Decision]
"""Takes what a gate's hit takes, in its order, and what `Limiter.hit` takes, by name."""

_BITS = 53
_MASK: int = 2**_BITS - 1


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
        self, algorithm: Algorithm, table: Table, lock: threading.Lock, clock: Clock, general: Hit
    ) -> QuickHit | None:
        """Return a hit on one unscoped rule that answers like the general one; `None` if there is no quicker one."""


def packing_for(algorithm: Algorithm) -> Packing:
    """Return how states of this algorithm are packed."""
    if isinstance(algorithm, FixedWindow):
        return FixedWindowPacking(algorithm)
    if isinstance(algorithm, TokenBucket) and algorithm.n:
        return TokenBucketPacking(algorithm)
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
        self, algorithm: Algorithm, table: Table, lock: threading.Lock, clock: Clock, general: Hit
    ) -> QuickHit | None:
        return None


class FixedWindowPacking:
    """One int per key."""

    def __init__(self, algorithm: FixedWindow) -> None:
        self.algorithm = algorithm

    def pack(self, state: State) -> Packed | State:
        birth, index, count = state
        return state if birth else index << _BITS | count

    def unpack(self, packed: Packed) -> State:
        assert isinstance(packed, int)
        return 0, packed >> _BITS, packed & _MASK

    def fresh_at(self, value: Packed | State) -> int:
        index: int = value >> _BITS if isinstance(value, int) else value[1]
        return (index + 1) * self.algorithm.period

    def quick_hit(
        self, algorithm: Algorithm, table: Table, lock: threading.Lock, clock: Clock, general: Hit
    ) -> QuickHit | None:
        assert isinstance(algorithm, FixedWindow)
        limit, period_ns, names = algorithm.limit, algorithm.period * 1000, (algorithm.name,)
        values = cast(dict[Any, Any], table.values)
        get, begin = values.get, table.begin
        monotonic_ns, epoch_ns = _ticker(clock)
        one = 1
        start = end = base = 0  # of the present window

        def hit(
            key: Any = None,
            cost: int = 1,
            tier: str | None = None,
            now_us: int | None = None,
            *,
            now: float | None = None,
        ) -> Decision:
            nonlocal start, end, base
            if tier is None and now_us is None and now is None:
                units = 1 if cost is one else _whole(cost, limit)
                with lock:
                    at = monotonic_ns()
                    if not start <= at < end:
                        index = (at + epoch_ns) // period_ns
                        start, end = index * period_ns - epoch_ns, (index + 1) * period_ns - epoch_ns
                        base = index << _BITS
                    try:
                        packed = get(key)
                    except TypeError:  # not hashable: the general way says what is wrong with it
                        packed = NotImplemented
                    if packed.__class__ is int:
                        count = packed - base
                        if count < 0:
                            count = 0  # of an earlier window
                    elif packed is None and units and begin(key, (at + epoch_ns) // 1000):
                        count = 0
                    else:
                        count = _MASK + 1
                    if count <= _MASK and units:  # more means a later window: the clock went back
                        after = count + units
                        reset_after = -((at - end) // 1000)
                        if after <= limit:
                            values[key] = base + after
                            return Decision(
                                (True, limit, limit - after, None, reset_after, names, 0, None, False)
                            )
                        left = limit - count if count < limit else 0
                        return Decision((False, limit, left, reset_after, reset_after, names, 0, None, False))
            return general(key, cost, tier, now_us if now is None else instant(now))

        return hit


class TokenBucketPacking:
    """One int per key."""

    def __init__(self, algorithm: TokenBucket) -> None:
        self.algorithm = algorithm
        self._shape = (0, algorithm.n, algorithm.d, algorithm.burst)

    def pack(self, state: State) -> Packed | State:
        birth, level, time, *rest = state
        return state if birth or tuple(rest) != self._shape else time << _BITS | level

    def unpack(self, packed: Packed) -> State:
        assert isinstance(packed, int)
        return (0, packed & _MASK, packed >> _BITS, *self._shape)

    def fresh_at(self, value: Packed | State) -> int:
        if isinstance(value, int):
            own = self.algorithm
            return ((value >> _BITS) - (value & _MASK) // -own.n) * own.tick
        return self.algorithm.fresh_at(value)  # type: ignore[arg-type]  # else a state

    def quick_hit(
        self, algorithm: Algorithm, table: Table, lock: threading.Lock, clock: Clock, general: Hit
    ) -> QuickHit | None:
        assert isinstance(algorithm, TokenBucket)
        n, d, tick, burst, names = (
            algorithm.n,
            algorithm.d,
            algorithm.tick,
            algorithm.burst,
            (algorithm.name,),
        )
        if (0, n, d, burst) != self._shape:
            return None  # the limit was changed while states of the old one are about
        capacity = burst * d
        even = (
            n == 1 and tick == 1
        )  # as of most quotas: then a part drains per microsecond, and nothing is divided
        values = cast(dict[Any, Any], table.values)
        get, begin = values.get, table.begin
        monotonic_ns, epoch_ns = _ticker(clock)
        one = 1

        def hit(
            key: Any = None,
            cost: int = 1,
            tier: str | None = None,
            now_us: int | None = None,
            *,
            now: float | None = None,
        ) -> Decision:
            if tier is None and now_us is None and now is None:
                units = 1 if cost is one else _whole(cost, burst)
                with lock:
                    at = (monotonic_ns() + epoch_ns) // 1000
                    time = at if tick == 1 else at // tick
                    try:
                        packed = get(key)
                    except TypeError:  # not hashable: the general way says what is wrong with it
                        packed = NotImplemented
                    if packed.__class__ is int:
                        passed = time - (packed >> _BITS)
                        level = (packed & _MASK) - n * passed
                        if level < 0:
                            level = 0
                    elif packed is None and units and begin(key, at):
                        passed = level = 0
                    else:
                        passed = -1
                    if passed >= 0 and units:  # less means that the clock went back
                        after = level + units * d
                        if after <= capacity:
                            values[key] = time << _BITS | after
                            reset_after = after if even else (time - after // -n) * tick - at
                            left = (capacity - after) // d
                            return Decision((True, burst, left, None, reset_after, names, 0, None, False))
                        left = 0 if units == 1 or level > capacity else (capacity - level) // d
                        if even:
                            retry_after, reset_after = after - capacity, level
                        else:
                            retry_after = (time - (after - capacity) // -n) * tick - at
                            reset_after = (time - level // -n) * tick - at
                        return Decision((False, burst, left, retry_after, reset_after, names, 0, None, False))
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
        return struct.pack(f"={3 + len(buckets)}q", expiry, buckets[-2], sum(buckets[1::2]), *buckets)

    def unpack(self, packed: Packed) -> State:
        assert isinstance(packed, bytes)
        return 0, *struct.unpack_from(f"={len(packed) // 8 - 3}q", packed, _HEAD.size)

    def fresh_at(self, value: Packed | State) -> int:
        newest: int = _HEAD.unpack_from(value)[1] if isinstance(value, bytes) else value[-2]  # type: ignore[index]  # else a state
        return newest * self.algorithm.width + self.algorithm.lifetime

    def quick_hit(
        self, algorithm: Algorithm, table: Table, lock: threading.Lock, clock: Clock, general: Hit
    ) -> QuickHit | None:
        assert isinstance(algorithm, SlidingWindow)
        limit, names = algorithm.limit, (algorithm.name,)
        width, lifetime = algorithm.width, algorithm.lifetime
        values = cast(dict[Any, Any], table.values)
        get, begin = values.get, table.begin
        monotonic_ns, epoch_ns = _ticker(clock)
        one = 1
        read_head, new_head = _HEAD.unpack_from, _HEAD.pack
        read_bucket, new_bucket = _BUCKET.unpack_from, _BUCKET.pack
        beginning, size = _HEAD.size, _BUCKET.size

        def hit(
            key: Any = None,
            cost: int = 1,
            tier: str | None = None,
            now_us: int | None = None,
            *,
            now: float | None = None,
        ) -> Decision:
            if tier is None and now_us is None and now is None:
                units = 1 if cost is one else _whole(cost, limit)
                with lock:
                    at = (monotonic_ns() + epoch_ns) // 1000
                    index = at // width
                    try:
                        buckets = get(key)
                    except TypeError:  # not hashable: the general way says what is wrong with it
                        buckets = NotImplemented
                    if buckets.__class__ is bytes and units:
                        expiry, newest, total = read_head(buckets)
                        first = beginning
                        if expiry <= at:
                            first, total = _first_live(buckets, at - lifetime, width, total)
                        after = total + units
                        if newest > index:
                            pass  # the clock went back
                        elif after <= limit:
                            if first > beginning:
                                oldest = read_bucket(buckets, first)[0] if first < len(buckets) else index
                                expiry = oldest * width + lifetime
                            head = new_head(expiry, index, after)
                            if newest == index:
                                there = read_bucket(buckets, -size)[1]
                                values[key] = head + buckets[first:-size] + new_bucket(index, there + units)
                            else:
                                values[key] = head + buckets[first:] + new_bucket(index, units)
                            reset_after = index * width + lifetime - at
                            return Decision(
                                (True, limit, limit - after, None, reset_after, names, 0, None, False)
                            )
                        else:
                            oldest, count = read_bucket(buckets, first)
                            if after - limit <= count:  # the oldest bucket frees enough
                                left = limit - total if total < limit else 0
                                retry_after = oldest * width + lifetime - at
                                reset_after = newest * width + lifetime - at
                                return Decision(
                                    (False, limit, left, retry_after, reset_after, names, 0, None, False)
                                )
                    elif buckets is None and units and begin(key, at):
                        expiry = index * width + lifetime
                        values[key] = _NEW.pack(expiry, index, units, index, units)
                        return Decision(
                            (True, limit, limit - units, None, expiry - at, names, 0, None, False)
                        )
            return general(key, cost, tier, now_us if now is None else instant(now))

        return hit


_HEAD = struct.Struct("=3q")  # expiry of the oldest bucket, newest index, total
_BUCKET = struct.Struct("=2q")  # index, units
_NEW = struct.Struct("=5q")


def _whole(cost: int, most: int) -> int:
    """Return a cost that the quick way can charge; 0 for any other, which the general way judges.

    That a 1 is usually *the* 1 spares most calls this one; 1.0 and True are not.
    """
    return cost if cost.__class__ is int and 0 < cost <= most else 0


def _first_live(buckets: bytes, dead_until: int, width: int, total: int) -> tuple[int, int]:
    """Return where the first bucket stands that began after `dead_until`, and the total without those before it."""
    first = _HEAD.size
    while first < len(buckets):
        index, units = _BUCKET.unpack_from(buckets, first)
        if index * width > dead_until:
            break
        total -= units
        first += _BUCKET.size
    return first, total


def _ticker(clock: Clock) -> tuple[Callable[[], int], int]:
    """Return a function and what to add to it for nanoseconds since the epoch: a call less for the usual clock."""
    if type(clock) is SteadyClock:
        return clock.monotonic_ns, clock.epoch_ns
    return (lambda: clock.now_us() * 1000), 0
