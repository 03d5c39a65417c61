"""The floor, the other limiters and Headgate, all behind one call: `hit(key)`.

Every peer is set up for memory as its own documentation says; the address is above each. Where a peer needs another
object per key, it gets the plain dict of them that its users write. `functools.partial` binds fixed arguments, because
a wrapper function would charge the peer for a call that its users do not make.

A peer that cannot do a task raises `NotOfferedError`. Packages are imported when built: one that is missing shows
up in the table and stops nothing else.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from operator import attrgetter
from threading import Lock
from typing import Any, Literal, NamedTuple
from unittest import mock

from benchmarks.harness import NotOfferedError, time_calls, time_holds, time_tiered_calls

HEADGATE = "Headgate"
PLAIN = f"{HEADGATE}, plain"
"""Not compiled; it has a process of its own, see `plain.py`."""
FLOOR = "floor"
FLOOR_PERIOD = 3600.0
"""The floor is a token bucket beside every rule; a short period of theirs would refill it during a sample."""
TIER = "pro"
EVERYONE = "*"
"""The scope of a rule with one counter for all."""


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
    """A limit."""

    kind: str
    limit: int
    period: int = 3600
    """Seconds."""
    scope: str | None = None
    """Whose units: `"user"`, `"ip"`, or `EVERYONE`; without one, those of the key."""


@dataclass(frozen=True)
class Task:
    """What a contender is asked to do."""

    rules: tuple[Rule, ...]
    call: Literal["hit", "check", "hold"] = "hit"
    """A hold is released at once."""
    tiered: bool = False
    """Whether calls name a tier, which has twice the limit."""
    keys: int = 1
    """How many it must be able to keep."""
    refused: bool = False
    """Whether the calls that count will be refused, by the last rule."""
    clock: FakeTime | None = None

    @property
    def only_rule(self) -> Rule:
        """The rule, for a contender that can do no more than hit a single one."""
        if len(self.rules) > 1 or self.call != "hit":
            raise NotOfferedError
        return self.rules[0]


Timer = Callable[[Callable[[Any], Any], Sequence[Any]], float]


class Driver(NamedTuple):
    """A contender at work."""

    hit: Callable[[Any], Any]
    close: Callable[[], object] = lambda: None
    allowed: Callable[[Any], bool] = bool
    awaits: bool = False
    """Whether `hit` returns something to await."""
    fill: Callable[[Any], Any] | None = None
    """What takes a unit, where `hit` does not."""
    timer: Timer = time_calls
    """What times calls, as users write them."""
    key: Callable[[str], Any] = str
    """What `hit` takes, made of a plain key before the calls are timed."""


class Answer(NamedTuple):
    """The cheapest decision object that a person would write."""

    allowed: bool
    limit: int
    remaining: int
    retry_after: float | None
    reset_after: float


def decision_floor(task: Task) -> Driver:
    """Build the least Python that decides one token bucket under a lock and says what a decision says."""
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
    """Build ours, compiled or not."""
    limiter = _headgate_limiter("Limiter", task)
    scopes = {rule.scope for rule in task.rules}
    key = partial(_scoped_key, scopes - {EVERYONE}) if scopes != {None} else str
    if task.tiered:
        hit = partial(limiter.hit, tier=TIER)
        return Driver(
            hit, limiter.close, timer=lambda _, keys: time_tiered_calls(limiter.hit, keys, TIER), key=key
        )
    if task.call == "hold":
        return Driver(limiter.hold, limiter.close, timer=time_holds, fill=limiter.hit)
    return Driver(getattr(limiter, task.call), limiter.close, fill=limiter.hit, key=key)


def headgate_async(task: Task) -> Driver:
    """Build ours for asyncio."""
    return Driver(_headgate_limiter("AsyncLimiter", task).hit, awaits=True)


def _scoped_key(scopes: Collection[str | None], key: str) -> dict[str | None, str]:
    parts = {"user": key, "ip": key[:6], EVERYONE: EVERYONE}
    return {scope: part for scope, part in parts.items() if scope in scopes}


def _headgate_limiter(name: str, task: Task) -> Any:
    import headgate as package
    from headgate.clock import SteadyClock

    clock = None if task.clock is None else SteadyClock(task.clock.monotonic_ns)  # as real programs have
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
    """Build what users write who have several rules and a peer without them: one hit after the other."""
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
# It has no token bucket; its cheapest strategy stands in for one.
_LIMITS = {
    "token_bucket": "FixedWindowRateLimiter",
    "fixed_window": "FixedWindowRateLimiter",
    "sliding_window": "SlidingWindowCounterRateLimiter",
    "sliding_log": "MovingWindowRateLimiter",
}


def limits(task: Task) -> Driver:
    """Build limits; a scope is one of the identifiers that it takes before the key."""
    from limits import strategies
    from limits.storage import MemoryStorage

    if task.call == "hold":
        raise NotOfferedError
    storage = MemoryStorage()
    made = [getattr(strategies, _LIMITS[rule.kind])(storage) for rule in task.rules]
    method = "test" if task.call == "check" else "hit"
    hits = _limits_calls(task, [getattr(strategy, method) for strategy in made])
    if task.call == "hit":
        return _in_turn(task, hits, bool)
    return Driver(hits[0], fill=_limits_calls(task, [made[0].hit])[0])


def limits_async(task: Task) -> Driver:
    """Build limits for asyncio: https://limits.readthedocs.io/en/stable/async.html."""
    from limits.aio import strategies
    from limits.aio.storage import MemoryStorage

    storage = MemoryStorage()
    hits = _limits_calls(task, [getattr(strategies, _LIMITS[rule.kind])(storage).hit for rule in task.rules])
    if len(hits) == 1:
        return Driver(hits[0], awaits=True)
    first, second = hits

    async def hit(key: str) -> bool:
        return bool(await first(key) and await second(key))

    return Driver(hit, awaits=True)


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


# https://throttled-py.readthedocs.io/en/latest/quickstart/store-backends.html: MemoryStore, whose MAX_SIZE of 1024
# would drop our keys; a sliding window keeps two entries per key.
def throttled(task: Task) -> Driver:
    """Build throttled-py."""
    import throttled as package

    throttles = [_throttle(package, task, rule) for rule in task.rules]
    if task.call == "hit":
        return _in_turn(task, [throttle.limit for throttle in throttles], _not_limited)
    if task.call == "check":  # what it returns says only what is left
        return Driver(throttles[0].peek, allowed=lambda _: not task.refused, fill=throttles[0].limit)
    raise NotOfferedError


def throttled_async(task: Task) -> Driver:
    """Build throttled-py for asyncio: https://throttled-py.readthedocs.io/en/latest/quickstart/quickstart.html."""
    import throttled.asyncio as package

    throttle = _throttle(package, task, task.only_rule)
    return Driver(throttle.limit, allowed=_not_limited, awaits=True)


def _throttle(package: Any, task: Task, rule: Rule) -> Any:
    if rule.kind == "sliding_log":
        raise NotOfferedError
    limit = (1 + task.tiered) * rule.limit
    return package.Throttled(
        using=rule.kind,
        quota=package.per_duration(timedelta(seconds=rule.period), limit, limit),
        store=package.MemoryStore(options={"MAX_SIZE": 3 * task.keys + 1024}),
    )


def _not_limited(result: Any) -> bool:
    return not result.limited


# https://pyratelimiter.readthedocs.io (README, "Algorithms"): StateBucket for a token bucket, InMemoryBucket for the
# rest, whose only sliding window is the log; several rates per bucket; "Custom routing with BucketFactory" for a bucket
# per key.
def pyrate(task: Task) -> Driver:
    """Build pyrate-limiter."""
    from pyrate_limiter import Limiter

    limiter = Limiter(_pyrate_factory(task) if task.keys > 1 else _pyrate_bucket(task))
    return Driver(partial(limiter.try_acquire, blocking=False), limiter.close)


def pyrate_async(task: Task) -> Driver:
    """Build pyrate-limiter for asyncio (README, "asyncio & event loops")."""
    from pyrate_limiter import BucketAsyncWrapper, Limiter, SingleBucketFactory

    # Its leak task would outlive the sample; a run of seconds has nothing to leak.
    factory = SingleBucketFactory(BucketAsyncWrapper(_pyrate_bucket(task)), schedule_leak=False)
    return Driver(partial(Limiter(factory).try_acquire_async, blocking=False), awaits=True)


def _pyrate_bucket(task: Task) -> Any:
    from pyrate_limiter import FixedWindow, InMemoryBucket, Rate, StateBucket, TokenBucket

    kinds = {rule.kind for rule in task.rules}
    if task.call != "hit" or len(kinds) > 1 or task.rules[0].limit > task.rules[-1].limit:
        raise NotOfferedError  # of its rates, a longer one must have a higher limit
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

    _pyrate_bucket(task)  # it may not be offered

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


# https://aiolimiter.readthedocs.io: one AsyncLimiter per limit, `await acquire()`. It waits instead of refusing, so a
# refusal is `has_capacity()`, which takes nothing.
def aiolimiter(task: Task) -> Driver:
    """Build aiolimiter: a leaky bucket that counts as a token bucket."""
    from aiolimiter import AsyncLimiter

    rule = task.only_rule
    if rule.kind != "token_bucket" or task.tiered:
        raise NotOfferedError
    limiters = defaultdict[str, Any](partial(AsyncLimiter, rule.limit, rule.period))

    def acquire(key: str) -> Any:
        return limiters[key].acquire()

    def has_capacity(key: str) -> Any:
        return limiters[key].has_capacity()

    if task.refused:
        return Driver(has_capacity, fill=acquire)
    return Driver(acquire, allowed=lambda nothing: nothing is None, awaits=True)


# https://github.com/falconry/token-bucket (docstrings): Limiter(rate, capacity, MemoryStorage()), `consume(key)`.
def token_bucket(task: Task) -> Driver:
    """Build token-bucket: a bare bool, no lock."""
    import token_bucket as package

    rule = task.only_rule
    if rule.kind != "token_bucket" or task.tiered:
        raise NotOfferedError
    limiter = package.Limiter(rule.limit / rule.period, rule.limit, package.MemoryStorage())
    return Driver(limiter.consume)


Build = Callable[[Task], Driver]
PEERS: dict[str, Build] = {
    "limits": limits,
    "throttled-py": throttled,
    "pyrate-limiter": pyrate,
    "token-bucket": token_bucket,
    "aiolimiter": aiolimiter,
}
ASYNC_PEERS: dict[str, Build] = {
    "limits": limits_async,
    "throttled-py": throttled_async,
    "pyrate-limiter": pyrate_async,
    "aiolimiter": aiolimiter,
}
FULL_PEERS = ("limits", "throttled-py", "pyrate-limiter")
"""The peers with several kinds of rules."""
