"""The floors, the other limiters and Headgate, all behind one call: `hit(key)`.

Every peer is set up for memory as its own documentation says; the address is above each. Where a peer needs another
object per key, it gets the plain dict of them that its users write. `functools.partial` binds fixed arguments, because
a wrapper function would charge the peer for a call that its users do not make.

A peer that has no rule of a kind raises `NotOfferedError`. Packages are imported when built: one that is missing shows
up in the table and stops nothing else.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from operator import attrgetter, itemgetter
from threading import Lock
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.harness import NotOfferedError

HEADGATE = "Headgate"
BARE = "floor: bare"
FLOOR = "floor: lock, NamedTuple"
FLOOR_PERIOD = 3600.0
"""A floor is a token bucket beside every rule; a short period of theirs would refill it during a sample."""
KINDS = ("token_bucket", "fixed_window", "sliding_window", "sliding_log")


class FakeTime:
    """A clock for all contenders: Headgate takes it as its own, `patched` puts it under everybody else."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def monotonic_ns(self) -> int:
        """Return the time as Headgate asks for it."""
        return round(self.seconds * 1_000_000) * 1000

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Make the standard library's clocks read this one."""

        def seconds() -> float:
            return self.seconds

        with contextlib.ExitStack() as stack:
            for module in ("time", "pyrate_limiter.clocks"):
                # pyrate-limiter has imported the names; it may also be missing.
                with contextlib.suppress(ImportError):
                    stack.enter_context(mock.patch(f"{module}.monotonic_ns", self.monotonic_ns))
                    stack.enter_context(mock.patch(f"{module}.time_ns", self.monotonic_ns))
            stack.enter_context(mock.patch("time.time", seconds))
            stack.enter_context(mock.patch("time.monotonic", seconds))
            yield


@dataclass(frozen=True)
class Rule:
    """What a contender is asked to enforce."""

    kind: str
    limit: int
    period: int = 3600
    """Seconds."""
    keys: int = 1
    """How many it must be able to hold."""
    refused: bool = False
    """Whether the calls that count will be refused."""
    clock: FakeTime | None = None


class Driver(NamedTuple):
    """A contender at work."""

    hit: Callable[[str], Any]
    close: Callable[[], object] = lambda: None
    allowed: Callable[[Any], bool] = bool
    awaits: bool = False
    """Whether `hit` returns something to await."""
    fill: Callable[[str], Any] | None = None
    """What takes a unit, where `hit` does not."""


class Answer(NamedTuple):
    """The cheapest decision object that a person would write."""

    allowed: bool
    limit: int
    remaining: int
    retry_after: float | None
    reset_after: float


@dataclass(frozen=True, slots=True)
class FrozenAnswer:
    """The same, as most people would write it."""

    allowed: bool
    limit: int
    remaining: int
    retry_after: float | None
    reset_after: float


def bare_floor(rule: Rule) -> Driver:
    """Build the least Python that decides one token bucket: dict get, clock, compare, store, a bool out."""
    period, emission = FLOOR_PERIOD, FLOOR_PERIOD / rule.limit
    full_at: dict[str, float] = {}
    get, clock = full_at.get, time.monotonic

    def hit(key: str) -> bool:
        now = clock()
        at = get(key, now)
        if at < now:
            at = now
        at += emission
        if at - now > period:
            return False
        full_at[key] = at
        return True

    return Driver(hit)


def decision_floor(rule: Rule, answer: type[Answer] | type[FrozenAnswer] = Answer) -> Driver:
    """Build the same with a lock and a decision object."""
    limit, period, emission = rule.limit, FLOOR_PERIOD, FLOOR_PERIOD / rule.limit
    full_at: dict[str, float] = {}
    get, clock, lock = full_at.get, time.monotonic, Lock()

    def hit(key: str) -> Answer | FrozenAnswer:
        with lock:
            now = clock()
            before = get(key, now)
            if before < now:
                before = now
            at = before + emission
            wait = at - now - period
            if wait > 0:
                return answer(False, limit, 0, wait, before - now)
            full_at[key] = at
        return answer(True, limit, int(-wait / emission), None, at - now)

    return Driver(hit, allowed=attrgetter("allowed"))


def headgate(rule: Rule) -> Driver:
    """Build ours."""
    limiter = _headgate_limiter("Limiter", rule)
    return Driver(limiter.hit, limiter.close)


def headgate_async(rule: Rule) -> Driver:
    """Build ours for asyncio."""
    return Driver(_headgate_limiter("AsyncLimiter", rule).hit, awaits=True)


def _headgate_limiter(name: str, rule: Rule) -> Any:
    import headgate as package
    from headgate.clock import SteadyClock

    clock = None if rule.clock is None else SteadyClock(rule.clock.monotonic_ns)  # as real programs have
    make_rule = getattr(package, rule.kind)
    return getattr(package, name)(make_rule(f"{rule.limit}/{rule.period}s"), clock=clock)


# https://limits.readthedocs.io/en/stable/quickstart.html: MemoryStorage, a strategy, `hit(item, key)`.
# It has no token bucket; its cheapest strategy stands in for one.
_LIMITS = {
    "token_bucket": "FixedWindowRateLimiter",
    "fixed_window": "FixedWindowRateLimiter",
    "sliding_window": "SlidingWindowCounterRateLimiter",
    "sliding_log": "MovingWindowRateLimiter",
}


def limits(rule: Rule) -> Driver:
    """Build limits."""
    strategy, item = _limits(rule)
    return Driver(partial(strategy.hit, item))


def _limits(rule: Rule) -> tuple[Any, Any]:
    from limits import parse, strategies
    from limits.storage import MemoryStorage

    strategy = getattr(strategies, _LIMITS[rule.kind])(MemoryStorage())
    return strategy, parse(f"{rule.limit} per {rule.period} second")


def limits_with_stats(rule: Rule) -> Driver:
    """Build limits, asked for what a decision says too: remaining units and the time of reset are a second call."""
    strategy, item = _limits(rule)

    def hit(key: str) -> tuple[bool, Any]:
        return strategy.hit(item, key), strategy.get_window_stats(item, key)

    return Driver(hit, allowed=itemgetter(0))


def limits_async(rule: Rule) -> Driver:
    """Build limits for asyncio: https://limits.readthedocs.io/en/stable/async.html."""
    from limits import parse
    from limits.aio import strategies
    from limits.aio.storage import MemoryStorage

    strategy = getattr(strategies, _LIMITS[rule.kind])(MemoryStorage())
    return Driver(partial(strategy.hit, parse(f"{rule.limit} per {rule.period} second")), awaits=True)


# https://throttled-py.readthedocs.io/en/latest/quickstart/store-backends.html: MemoryStore, whose MAX_SIZE of 1024
# would drop our keys; a sliding window keeps two entries per key.
def throttled(rule: Rule) -> Driver:
    """Build throttled-py."""
    import throttled as package

    return Driver(_throttle(package, rule).limit, allowed=_not_limited)


def throttled_async(rule: Rule) -> Driver:
    """Build throttled-py for asyncio: https://throttled-py.readthedocs.io/en/latest/quickstart/quickstart.html."""
    import throttled.asyncio as package

    return Driver(_throttle(package, rule).limit, allowed=_not_limited, awaits=True)


def _throttle(package: Any, rule: Rule) -> Any:
    if rule.kind == "sliding_log":
        raise NotOfferedError
    return package.Throttled(
        using=rule.kind,
        quota=package.per_duration(timedelta(seconds=rule.period), rule.limit, rule.limit),
        store=package.MemoryStore(options={"MAX_SIZE": 3 * rule.keys + 1024}),
    )


def _not_limited(result: Any) -> bool:
    return not result.limited


# https://pyratelimiter.readthedocs.io (README, "Algorithms"): StateBucket for a token bucket, InMemoryBucket for the
# rest, whose only sliding window is the log; "Custom routing with BucketFactory" for a bucket per key.
def pyrate(rule: Rule) -> Driver:
    """Build pyrate-limiter."""
    from pyrate_limiter import Limiter

    limiter = Limiter(_pyrate_factory(rule) if rule.keys > 1 else _pyrate_bucket(rule))
    return Driver(partial(limiter.try_acquire, blocking=False), limiter.close)


def pyrate_async(rule: Rule) -> Driver:
    """Build pyrate-limiter for asyncio (README, "asyncio & event loops")."""
    from pyrate_limiter import BucketAsyncWrapper, Limiter, SingleBucketFactory

    # Its leak task would outlive the sample; a run of seconds has nothing to leak.
    factory = SingleBucketFactory(BucketAsyncWrapper(_pyrate_bucket(rule)), schedule_leak=False)
    return Driver(partial(Limiter(factory).try_acquire_async, blocking=False), awaits=True)


def _pyrate_bucket(rule: Rule) -> Any:
    from pyrate_limiter import FixedWindow, InMemoryBucket, Rate, StateBucket, TokenBucket

    rates = [Rate(rule.limit, rule.period * 1000)]
    match rule.kind:
        case "token_bucket":
            return StateBucket(rates, algorithm=TokenBucket())
        case "fixed_window":
            return InMemoryBucket(rates, algorithm=FixedWindow())
        case _:
            return InMemoryBucket(rates)


def _pyrate_factory(rule: Rule) -> Any:
    from pyrate_limiter import BucketFactory, MonotonicClock, RateItem

    class PerName(BucketFactory):  # type: ignore[misc, unused-ignore]  # untyped where it is not installed
        def __init__(self) -> None:
            self.clock = MonotonicClock()
            self.buckets: dict[str, Any] = {}

        def wrap_item(self, name: str, weight: int = 1) -> RateItem:
            return RateItem(name, self.clock.now(), weight=weight)

        def get(self, item: RateItem) -> Any:
            if item.name not in self.buckets:
                bucket = self.buckets[item.name] = _pyrate_bucket(rule)
                self.schedule_leak(bucket)
            return self.buckets[item.name]

    return PerName()


# https://aiolimiter.readthedocs.io: one AsyncLimiter per limit, `await acquire()`. It waits instead of refusing, so a
# refusal is `has_capacity()`, which takes nothing.
def aiolimiter(rule: Rule) -> Driver:
    """Build aiolimiter: a leaky bucket that counts as a token bucket."""
    from aiolimiter import AsyncLimiter

    if rule.kind != "token_bucket":
        raise NotOfferedError
    limiters = {f"user:{i}": AsyncLimiter(rule.limit, rule.period) for i in range(rule.keys)}

    def acquire(key: str) -> Any:
        return limiters[key].acquire()

    def has_capacity(key: str) -> Any:
        return limiters[key].has_capacity()

    if rule.refused:
        return Driver(has_capacity, fill=acquire)
    return Driver(acquire, allowed=lambda nothing: nothing is None, awaits=True)


# https://github.com/falconry/token-bucket (docstrings): Limiter(rate, capacity, MemoryStorage()), `consume(key)`.
def token_bucket(rule: Rule) -> Driver:
    """Build token-bucket: a bare bool, no lock."""
    import token_bucket as package

    if rule.kind != "token_bucket":
        raise NotOfferedError
    limiter = package.Limiter(rule.limit / rule.period, rule.limit, package.MemoryStorage())
    return Driver(limiter.consume)


CONTENDERS: dict[str, Callable[[Rule], Driver]] = {
    BARE: bare_floor,
    FLOOR: decision_floor,
    "floor: lock, frozen dataclass": partial(decision_floor, answer=FrozenAnswer),
    HEADGATE: headgate,
    "token-bucket": token_bucket,
    "aiolimiter": aiolimiter,
    "limits": limits,
    "limits, hit and window stats": limits_with_stats,
    "throttled-py": throttled,
    "pyrate-limiter": pyrate,
}
OWN_ASYNC: dict[str, Callable[[Rule], Driver]] = {HEADGATE: headgate, f"{HEADGATE} async": headgate_async}
ASYNC_CONTENDERS: dict[str, Callable[[Rule], Driver]] = {
    **OWN_ASYNC,
    "aiolimiter": aiolimiter,
    "limits async": limits_async,
    "throttled-py async": throttled_async,
    "pyrate-limiter async": pyrate_async,
}
FULL_PEERS = ("limits", "throttled-py", "pyrate-limiter")
"""The peers with several rules, which the targets name."""
