"""The contenders in memory, all called as `hit(key)`: the floor, the other limiters (peers) and Headgate.

The floor is the least hand-written Python for the task. Every peer is configured as its documentation recommends; a comment
names the page. If a peer needs one object per key, they are in a plain dict, as in programs of its users.
`functools.partial` binds fixed arguments, because a wrapper function would add the cost of a call that users do not make.

`NotOfferedError` means that a peer does not support a task. Packages are imported by the build functions: if one is
missing, the table shows it and the other contenders still run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from operator import attrgetter
from threading import Lock
from typing import Any, Literal, NamedTuple
from unittest import mock

from benchmarks.harness import HEADGATE, NotOfferedError

PLAIN = f"{HEADGATE}, plain"
"""Headgate as plain Python, in a second process; see `plain.py`."""
FLOOR = "floor"
FLOOR_PERIOD = 3600.0
"""The period of the floor, a token bucket for every kind of rule. A short period would refill it during a sample."""
TIER = "pro"
EVERYONE = "*"
"""The scope of a rule with one counter for all."""


class FakeTime:
    """A clock for all contenders: Headgate accepts it as an argument, and `patched` replaces the clocks of the others."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def monotonic_ns(self) -> int:
        """Return the time for Headgate's clock."""
        return round(self.seconds * 1_000_000) * 1000

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Replace the clocks of the standard library with this clock."""

        def seconds() -> float:
            return self.seconds

        with contextlib.ExitStack() as stack:
            for module in ("time", "pyrate_limiter.clocks"):
                # pyrate-limiter imports the functions by name, and may be missing.
                with contextlib.suppress(ImportError):
                    stack.enter_context(mock.patch(f"{module}.monotonic_ns", self.monotonic_ns))
                    stack.enter_context(mock.patch(f"{module}.time_ns", self.monotonic_ns))
            stack.enter_context(mock.patch("time.time", seconds))
            stack.enter_context(mock.patch("time.monotonic", seconds))
            yield


@dataclass(frozen=True)
class Rule:
    """A limit."""

    kind: str
    limit: int
    period: int = 3600
    """Seconds."""
    scope: str | None = None
    """The part of the key that the rule counts by: `"user"`, `"ip"`, `EVERYONE`, or None for the whole key."""


@dataclass(frozen=True)
class Task:
    """The task of a contender."""

    rules: tuple[Rule, ...]
    call: Literal["hit", "check", "hold"] = "hit"
    """The called operation; a hold is released immediately."""
    tiered: bool = False
    """Whether calls specify a tier with twice the limit."""
    keys: int = 1
    """The number of keys that must fit into the store."""
    refused: bool = False
    """Whether the last rule refuses the measured calls."""
    clock: FakeTime | None = None


class Driver(NamedTuple):
    """A contender ready for calls."""

    hit: Callable[[Any], Any]
    close: Callable[[], object] = lambda: None
    allowed: Callable[[Any], bool] = bool
    awaits: bool = False
    """Whether `hit` returns an awaitable."""
    fill: Callable[[Any], Any] | None = None
    """The call that takes a unit, if `hit` does not."""
    key: Callable[[str], Any] = str
    """Converts a plain key to the argument of `hit`; not measured."""


class Answer(NamedTuple):
    """The cheapest decision object that a programmer would write by hand."""

    allowed: bool
    limit: int
    remaining: int
    retry_after: float | None
    reset_after: float


def decision_floor(task: Task) -> Driver:
    """Build the least Python for one token bucket with a lock that returns all fields of a decision."""
    limit, period = task.rules[-1].limit, FLOOR_PERIOD
    emission = period / limit
    full_at: dict[str, float] = {}
    get, clock, lock = full_at.get, time.monotonic, Lock()

    def hit(key: str) -> Answer:
        with lock:
            now = clock()
            before = get(key, now)
            if before < now:
                before = now
            at = before + emission
            wait = at - now - period
            if wait > 0:
                return Answer(False, limit, 0, wait, before - now)
            full_at[key] = at
        return Answer(True, limit, int(-wait / emission), None, at - now)

    return Driver(hit, allowed=attrgetter("allowed"))


def headgate(task: Task) -> Driver:
    """Build Headgate, compiled or not."""
    limiter = _headgate_limiter("Limiter", task)
    scopes = {rule.scope for rule in task.rules}
    key = partial(_scoped_key, scopes - {EVERYONE}) if scopes != {None} else str
    if task.tiered:
        return Driver(partial(limiter.hit, tier=TIER), limiter.close, key=key)
    if task.call == "hold":
        return Driver(lambda key: limiter.hold(key).release() or True, limiter.close, fill=limiter.hit)
    return Driver(getattr(limiter, task.call), limiter.close, fill=limiter.hit, key=key)


def headgate_async(task: Task) -> Driver:
    """Build Headgate for asyncio."""
    return Driver(_headgate_limiter("AsyncLimiter", task).hit, awaits=True)


def _scoped_key(scopes: Collection[str | None], key: str) -> dict[str | None, str]:
    parts = {"user": key, "ip": key[:6], EVERYONE: EVERYONE}
    return {scope: part for scope, part in parts.items() if scope in scopes}


def _headgate_limiter(name: str, task: Task) -> Any:
    import headgate as package
    from headgate.clock import SteadyClock

    clock = None if task.clock is None else SteadyClock(task.clock.monotonic_ns)  # None is the default clock
    rules = [
        getattr(package, rule.kind)(
            f"{rule.limit}/{rule.period}s",
            scope=rule.scope,
            tiers={TIER: f"{2 * rule.limit}/{rule.period}s"} if task.tiered else {},
        )
        for rule in task.rules
    ]
    return getattr(package, name)(*rules, clock=clock)


def _in_turn(task: Task, hits: Sequence[Callable[[str], Any]], allowed: Callable[[Any], bool]) -> Driver:
    """Build the code of users for a peer without support for several rules: one hit after another."""
    if len(hits) == 1:
        return Driver(hits[0], allowed=allowed)
    if not task.rules[0].scope:
        first, second = hits
        return Driver(lambda key: allowed(first(key)) and allowed(second(key)))
    by_scope = [(rule.scope, hit) for rule, hit in zip(task.rules, hits, strict=True)]

    def hit(key: dict[str | None, str]) -> bool:
        for scope, hit_rule in by_scope:  # noqa: SIM110  # a generator costs more
            if not allowed(hit_rule(key[scope])):
                return False
        return True

    return Driver(hit, key=partial(_scoped_key, [rule.scope for rule in task.rules]))


# https://limits.readthedocs.io/en/stable/quickstart.html: MemoryStorage, a strategy, `hit(item, key)`.
# It has no token bucket; its cheapest strategy replaces it.
_LIMITS = {
    "token_bucket": "FixedWindowRateLimiter",
    "fixed_window": "FixedWindowRateLimiter",
    "sliding_window": "SlidingWindowCounterRateLimiter",
    "sliding_log": "MovingWindowRateLimiter",
}


def limits(task: Task) -> Driver:
    """Build limits; a scope is an identifier before the key."""
    from limits import strategies
    from limits.storage import MemoryStorage

    if task.call == "hold":
        raise NotOfferedError
    storage = MemoryStorage()
    made = [getattr(strategies, _LIMITS[rule.kind])(storage) for rule in task.rules]
    if task.call == "hit":
        return _in_turn(task, _limits_calls(task, [strategy.hit for strategy in made]), bool)
    [test, hit] = (_limits_calls(task, [call])[0] for call in (made[0].test, made[0].hit))
    return Driver(test, fill=hit)


def _limits_calls(task: Task, calls: Sequence[Callable[..., Any]]) -> list[Callable[[str], Any]]:
    from limits import parse

    return [
        partial(
            call,
            parse(f"{(1 + task.tiered) * rule.limit} per {rule.period} second"),
            *([rule.scope] if rule.scope else []),
        )
        for rule, call in zip(task.rules, calls, strict=True)
    ]


# https://throttled-py.readthedocs.io/en/latest/quickstart/store-backends.html: MemoryStore. Its default MAX_SIZE of 1024
# would drop keys; a sliding window keeps two entries per key.
def throttled(task: Task) -> Driver:
    """Build throttled-py."""
    import throttled as package

    if task.call == "hold" or task.rules[0].kind == "sliding_log":
        raise NotOfferedError
    throttles = [
        package.Throttled(
            using=rule.kind,
            quota=package.per_duration(timedelta(seconds=rule.period), *[(1 + task.tiered) * rule.limit] * 2),
            store=package.MemoryStore(options={"MAX_SIZE": 3 * task.keys + 1024}),
        )
        for rule in task.rules
    ]
    if task.call == "check":  # it only returns the remaining units
        return Driver(throttles[0].peek, allowed=lambda _: not task.refused, fill=throttles[0].limit)
    return _in_turn(task, [throttle.limit for throttle in throttles], lambda result: not result.limited)


# https://pyratelimiter.readthedocs.io (README, "Algorithms"): StateBucket for a token bucket, InMemoryBucket for other
# rules, whose only sliding window is the log; several rates per bucket; "Custom routing with BucketFactory" for a bucket
# per key.
def pyrate(task: Task) -> Driver:
    """Build pyrate-limiter."""
    from pyrate_limiter import Limiter

    limiter = Limiter(_pyrate_factory(task) if task.keys > 1 else _pyrate_bucket(task))
    return Driver(partial(limiter.try_acquire, blocking=False), limiter.close)


def _pyrate_bucket(task: Task) -> Any:
    from pyrate_limiter import FixedWindow, InMemoryBucket, Rate, StateBucket, TokenBucket

    kinds = {rule.kind for rule in task.rules}
    if task.call != "hit" or len(kinds) > 1 or task.rules[0].limit > task.rules[-1].limit:
        raise NotOfferedError  # a rate with a longer period must have a higher limit
    rates = [Rate((1 + task.tiered) * rule.limit, rule.period * 1000) for rule in task.rules]
    match kinds.pop():
        case "token_bucket":
            return StateBucket(rates, algorithm=TokenBucket())
        case "fixed_window":
            return InMemoryBucket(rates, algorithm=FixedWindow())
        case _:
            return InMemoryBucket(rates)


def _pyrate_factory(task: Task) -> Any:
    from pyrate_limiter import BucketFactory, MonotonicClock, RateItem

    _pyrate_bucket(task)  # raises NotOfferedError

    class PerName(BucketFactory):  # type: ignore[misc, unused-ignore]  # untyped where it is not installed
        def __init__(self) -> None:
            self.clock = MonotonicClock()
            self.buckets: dict[str, Any] = {}

        def wrap_item(self, name: str, weight: int = 1) -> RateItem:
            return RateItem(name, self.clock.now(), weight=weight)

        def get(self, item: RateItem) -> Any:
            if item.name not in self.buckets:
                bucket = self.buckets[item.name] = _pyrate_bucket(task)
                self.schedule_leak(bucket)
            return self.buckets[item.name]

    return PerName()


Build = Callable[[Task], Driver]
PEERS: dict[str, Build] = {"limits": limits, "throttled-py": throttled, "pyrate-limiter": pyrate}
