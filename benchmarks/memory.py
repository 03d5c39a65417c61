"""Decisions in memory, of a hand-written floor, other limiters and Headgate: CPU time of one call, bytes per key,
exactness.

    python -m benchmarks.memory [--quick]

A *shape* is a way to use a limiter: its rules, the called method, and whether it admits. Every shape is measured with one
key and with a thousand keys. States do not expire between rounds; one shape has new keys only.

CPU time is the time of the calling thread: other processes do not affect it, and clean-up threads of a contender are not
included.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from benchmarks import footprint, overshoot
from benchmarks.contenders import (
    EVERYONE,
    FLOOR,
    PEERS,
    PLAIN,
    Build,
    Rule,
    Task,
    decision_floor,
    headgate_async,
)
from benchmarks.harness import (
    HEADGATE,
    Result,
    Scale,
    Section,
    Target,
    announce,
    each,
    interleave,
    main,
    notes,
    number,
    table,
    worst_of,
)
from benchmarks.plain import OURS, LocalObject, RemoteObject, check_build, compiled, plain

MANY = 1000
SECONDS_APART = 1.05
"""Seconds between two fills. A window of a minute has buckets of a second, so the first fill is not in the newest bucket."""
PREPARATION_SECONDS = 15
"""Seconds to prepare and sample a full sliding window, during which peers with counters must not change windows."""
MINUTE, HOUR, DAY = 60, 3600, 86_400
LOTS, FEW = 0, 10
"""Limits: `LOTS` is replaced by a high limit that depends on the number of keys; `FEW` is used up."""
ASYNC = "async"
TIMES_LIMITS = {"one rule": 5.0, "two rules": 7.0}
"""Minimum ratio of the CPU time of the package limits to that of Headgate, for every shape of a group."""
ASYNC_OVER_SYNC = 2.0

Found = Mapping[str, Mapping[str, Result]]


@dataclass(frozen=True)
class Shape:
    """A way to use a limiter."""

    name: str
    task: Task
    group: str
    new_keys: bool = False

    def sized(self, keys: int) -> Shape:
        """Return the same shape with this number of keys, and limits with which no state expires between two rounds."""
        lots = 1_000_000 if keys == 1 or self.new_keys else 10_000
        rules = tuple(
            replace(rule, limit=rule.limit or (1 + i) * lots) for i, rule in enumerate(self.task.rules)
        )
        name = self.name if self.new_keys else f"{self.name}, {keys:,} key{'s' if keys > 1 else ''}"
        return replace(self, name=name, task=replace(self.task, rules=rules, keys=keys))

    @property
    def slides(self) -> bool:
        """Whether a sliding window is among the rules."""
        return any(rule.kind == "sliding_window" for rule in self.task.rules)


def _shapes() -> Iterator[Shape]:
    bucket, fixed, sliding = ("token_bucket", DAY), ("fixed_window", HOUR), ("sliding_window", MINUTE)

    def rule(kind: tuple[str, int], limit: int = LOTS, scope: str | None = None) -> Rule:
        return Rule(kind[0], limit, kind[1], scope)

    for kind in (bucket, fixed, sliding):
        yield Shape(kind[0], Task((rule(kind),)), "one rule")
        yield Shape(f"{kind[0]} refused", Task((rule(kind, FEW),), refused=True), "one rule")
    yield Shape("one tiered token_bucket", Task((rule(bucket),), tiered=True), "tier")
    yield Shape("one scoped sliding_window", Task((rule(sliding, scope="user"),)), "scope")
    for kind in (fixed, sliding):
        longer = (kind[0], DAY)
        yield Shape(f"two {kind[0]}s", Task((rule(kind), rule(longer))), "two rules")
        full = Task((rule(kind), rule(longer, FEW)), refused=True)
        yield Shape(f"two {kind[0]}s refused", full, "two rules")
    scoped = (rule(sliding, scope="user"), rule(bucket, scope="ip"), rule(fixed, scope=EVERYONE))
    yield Shape("three scoped rules", Task(scoped), "three rules")
    yield Shape("check of a token_bucket", Task((rule(bucket),), "check"), "check")
    yield Shape("hold of a token_bucket, released", Task((rule(bucket),), "hold"), "hold")
    fast = Rule("token_bucket", LOTS, HOUR)  # a unit expires after 3.6 ms, so old keys expire during a sample
    yield Shape("token_bucket, new keys all the time", Task((fast,)), "new keys", new_keys=True)


SHAPES = [shape.sized(keys) for shape in _shapes() for keys in ((MANY,) if shape.new_keys else (1, MANY))]
AWAITED = [shape for shape in SHAPES if shape.task.keys == 1 and shape.group in TIMES_LIMITS]
CONTENDERS: dict[str, Build] = {FLOOR: decision_floor, **OURS, **PEERS}
WITH_ASYNC: dict[str, Build] = {
    **OURS,
    f"{HEADGATE} {ASYNC}": partial(compiled, build=headgate_async),
    f"{PLAIN} {ASYNC}": partial(plain, build=headgate_async),
}


def run(scale: Scale) -> Iterator[Section]:
    """Measure calls, awaited calls, long logs, bytes per key, and the admissions of a sliding window."""
    found = {shape.name: _measure(shape, CONTENDERS, scale) for shape in SHAPES}
    yield _calls(found)
    yield _awaited_calls({shape.name: _measure(shape, WITH_ASYNC, scale) for shape in AWAITED})
    yield _logs(scale)
    yield footprint.measure(scale)
    yield overshoot.measure(scale)


class Trial(LocalObject):
    """One contender with one shape."""

    def __init__(self, build: Build, shape: Shape, calls: int) -> None:
        self.shape, self.calls = shape, calls
        self.driver = build(shape.task)
        self.loop = asyncio.Runner()
        self.numbers = count()
        names = [f"user:{i}" for i in range(shape.task.keys)]
        random.Random(7).shuffle(names)
        self.own = [self.driver.key(name) for name in names]
        self.keys = (self.own * (calls // len(names) + 1))[:calls]

    def fill(self) -> None:
        """Take one unit of each key, or half of its limit for a refused shape."""
        take = self.driver.fill or self.driver.hit
        self.loop.run(_call_all(take, self.own * (FEW // 2 if self.shape.task.refused else 1)))

    def verify(self) -> None:
        """Check that calls are admitted or refused as the shape requires."""
        answer, refused = self.loop.run(_call_all(self.driver.hit, self.own[:1])), self.shape.task.refused
        if self.driver.allowed(answer) is refused:
            raise RuntimeError(f"answered {answer}, but it should {'refuse' if refused else 'admit'}")

    def sample(self) -> float:
        """Return CPU nanoseconds per call."""
        keys = [f"new:{next(self.numbers)}" for _ in self.keys] if self.shape.new_keys else self.keys
        if self.driver.awaits:
            return self.loop.run(_time_awaits(self.driver.hit, keys))
        return _time_calls(self.driver.hit, keys)

    def close(self) -> None:
        """Close the contender and the event loop."""
        self.driver.close()
        self.loop.close()


async def _call_all(call: Any, keys: Sequence[Any]) -> Any:
    for key in keys:
        answer = call(key)
        if inspect.isawaitable(answer):
            answer = await answer
    return answer


def _time_calls(hit: Callable[[Any], Any], keys: Sequence[Any]) -> float:
    start = time.thread_time_ns()
    for key in keys:
        hit(key)
    return (time.thread_time_ns() - start) / len(keys)


async def _time_awaits(hit: Callable[[Any], Awaitable[Any]], keys: Sequence[Any]) -> float:
    start = time.thread_time_ns()
    for key in keys:
        await hit(key)
    return (time.thread_time_ns() - start) / len(keys)


def _measure(shape: Shape, contenders: Mapping[str, Build], scale: Scale) -> dict[str, Result]:
    announce(shape.name)
    if shape.slides and shape.task.refused:
        _await_room_in_window()

    def make(contender: tuple[str, Build]) -> LocalObject:
        name, build = contender
        args = (build, shape, scale.calls // 2)  # three times as many rounds as usual, but shorter
        return RemoteObject(name, Trial, *args) if name.startswith(PLAIN) else Trial(*args)

    trials = _call_each("fill", each({name: (name, build) for name, build in contenders.items()}, make))
    if shape.slides:
        time.sleep(SECONDS_APART)
    trials = _call_each("verify", _call_each("fill", trials))
    results = interleave(each(trials, lambda trial: partial(trial.call, "sample")), 3 * scale.rounds)
    _call_each("close", trials)
    return results


def _call_each(method: str, trials: Mapping[str, LocalObject | Result]) -> dict[str, LocalObject | Result]:
    """Call a method of each trial, and return the trials."""

    def take(trial: LocalObject) -> LocalObject:
        trial.call(method)
        return trial

    return each(trials, take)


def _await_room_in_window() -> None:
    passed = time.time() % MINUTE
    if passed > MINUTE - PREPARATION_SECONDS:
        time.sleep(MINUTE - passed)


def _calls(found: Found) -> Section:
    rows = [
        [
            name,
            *(number(results[ours].times(results[FLOOR]), 2) for ours in OURS),
            *(number(results[peer].times(results[HEADGATE]), 1) for peer in PEERS),
            number(results["limits"].times(results[PLAIN]), 1),
        ]
        for name, results in found.items()
    ]
    headers = ["", *(f"{ours} ÷ floor" for ours in OURS), *(f"{peer} ÷" for peer in PEERS), "limits ÷ plain"]
    return Section(
        "decisions",
        [
            _times("CPU ns per call; limits has no token bucket: its fixed window replaces it", found),
            table("The same as ratios", headers, rows),
            *notes(*found.values()),
        ],
        dict(found),
        [
            worst_of(f"memory, {group}: limits ÷ {HEADGATE}", bound, _over_limits(found, group), False)
            for group, bound in TIMES_LIMITS.items()
        ],
    )


def _over_limits(found: Found, group: str) -> dict[str, float]:
    return {
        shape.name: found[shape.name]["limits"].times(found[shape.name][HEADGATE])
        for shape in SHAPES
        if shape.group == group
    }


def _awaited_calls(found: Found) -> Section:
    ratios = {
        ours: {name: results[f"{ours} {ASYNC}"].times(results[ours]) for name, results in found.items()}
        for ours in OURS
    }
    rows = [[name, *(number(ratios[ours][name], 2) for ours in OURS)] for name in found]
    return Section(
        ASYNC,
        [
            _times("await hit(key): CPU ns per call", found),
            table("Async ÷ sync", ["", *OURS], rows),
            *notes(*found.values()),
        ],
        dict(found),
        [worst_of("memory, asyncio ÷ sync", ASYNC_OVER_SYNC, ratios[HEADGATE], at_most=True)],
    )


def _times(title: str, found: Found) -> str:
    names = list(next(iter(found.values())))
    return table(
        title, ["", *names], [[shape, *(row[name].cell for name in names)] for shape, row in found.items()]
    )


# --- A full sliding log in steady state: in each step one entry expires and one is admitted ---------------------------

LENGTHS = (1_000, 10_000, 100_000)
STEP_NS = 1_000_000


class FullLog(LocalObject):
    """A limiter with a full log, and a clock that advances by a millisecond on every reading."""

    def __init__(self, is_compiled: bool, length: int, steps: int) -> None:
        from headgate import Limiter, sliding_log
        from headgate.clock import SteadyClock

        check_build(compiled=is_compiled)
        clock = SteadyClock(count(10**15, STEP_NS).__next__)
        self.hit = Limiter(sliding_log(f"{length}/{length}ms"), clock=clock).hit
        self.keys = ["user:0"] * steps
        _time_calls(self.hit, ["user:0"] * (length + 1))
        decision = self.hit("user:0")
        if not decision or decision.remaining:
            raise RuntimeError(f"the log is not full and in steady state: {decision}")

    def sample(self) -> float:
        """Return CPU nanoseconds per step."""
        return _time_calls(self.hit, self.keys)


def _logs(scale: Scale) -> Section:
    announce("a full sliding log in steady state")
    makers: dict[str, Callable[[], LocalObject]] = {}
    for length in LENGTHS:
        makers[f"{HEADGATE}: {length:,}"] = partial(FullLog, True, length, scale.calls // 2)
        name = f"{PLAIN}: {length:,}"
        makers[name] = partial(RemoteObject, name, FullLog, False, length, scale.calls // 2)
    logs = each(makers, lambda make: make())
    found = interleave(each(logs, lambda log: partial(log.call, "sample")), 3 * scale.rounds)
    shortest, longest = (f"{length:,}" for length in (LENGTHS[0], LENGTHS[-1]))
    growth = {name: found[f"{name}: {longest}"].times(found[f"{name}: {shortest}"]) for name in OURS}
    rows = [
        [name, *(found[f"{name}: {n:,}"].cell for n in LENGTHS), number(growth[name], 2)] for name in OURS
    ]
    headers = ["", *(f"{length:,}" for length in LENGTHS), "last ÷ first"]
    title = "A full sliding log in steady state: CPU ns per hit, by length"
    targets = [
        Target(f"sliding_log of {longest} ÷ {shortest}", 1.5, growth[name], True, name) for name in OURS
    ]
    return Section("sliding log", [table(title, headers, rows), *notes(found)], dict(found), targets)


if __name__ == "__main__":
    main("memory", __doc__, run)
