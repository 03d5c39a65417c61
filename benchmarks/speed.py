"""CPU time of one call, by shape: what rules a limiter has, how it is asked, and what it answers.

Every shape is measured with one key and with many. States stay alive from round to round; one shape has new keys only.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from benchmarks.contenders import (
    ASYNC_PEERS,
    EVERYONE,
    FLOOR,
    FULL_PEERS,
    HEADGATE,
    PEERS,
    PLAIN,
    Build,
    Rule,
    Task,
    decision_floor,
    headgate_async,
)
from benchmarks.harness import (
    Panel,
    Progress,
    Result,
    Scale,
    Section,
    Target,
    each,
    interleave,
    notes,
    number,
    table,
    time_awaits,
    worst_of,
)
from benchmarks.plain import Here, There, compiled, plain

MANY = 1000
SECONDS_APART = 1.05
"""A window of a minute has buckets of a second: two fills so far apart leave a bucket besides the newest."""
PREPARATION_SECONDS = 15
"""What a full sliding window may take to prepare and sample; counters of two windows must not roll over meanwhile."""
MINUTE, HOUR, DAY = 60, 3600, 86_400
LOTS, FEW = 0, 10
"""Limits: one that is never reached, to be chosen by the number of keys, and one that is used up."""


@dataclass(frozen=True)
class Shape:
    """A way to use a limiter, and what was promised for it: how it compares to the floor and to limits."""

    name: str
    task: Task
    group: str
    over_floor: float = float("nan")
    under_limits: float = float("nan")
    new_keys: bool = False

    def sized(self, keys: int) -> Shape:
        """Return the same with so many keys, and limits that keep every state alive between two rounds."""
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

    for kind, under_limits in ((bucket, 6), (fixed, 6), (sliding, 10)):
        one = partial(Shape, group="one rule", over_floor=0.8, under_limits=under_limits)
        yield one(kind[0], Task((rule(kind),)))
        yield one(f"{kind[0]} refused", Task((rule(kind, FEW),), refused=True))
    one = partial(Shape, group="one rule", over_floor=0.8)
    yield one("one tiered token_bucket", Task((rule(bucket),), tiered=True), under_limits=6)
    yield one("one scoped sliding_window", Task((rule(sliding, scope="user"),)), under_limits=10)
    for kind, under_limits in ((fixed, 8), (sliding, 12)):
        two = partial(Shape, group="two rules", over_floor=1.2, under_limits=under_limits)
        longer = (kind[0], DAY)
        yield two(f"two {kind[0]}s", Task((rule(kind), rule(longer))))
        yield two(f"two {kind[0]}s refused", Task((rule(kind), rule(longer, FEW)), refused=True))
    scoped = (rule(sliding, scope="user"), rule(bucket, scope="ip"), rule(fixed, scope=EVERYONE))
    yield Shape("three scoped rules", Task(scoped), "three scoped rules", 1.6, 8)
    yield Shape("check of a token_bucket", Task((rule(bucket),), "check"), "check", 0.9)
    yield Shape("hold of a token_bucket, released", Task((rule(bucket),), "hold"), "hold", 4.5)
    fast = Rule("token_bucket", LOTS, HOUR)  # a unit lasts 3.6 ms: while new keys come, the old ones expire
    yield Shape("token_bucket, new keys all the time", Task((fast,)), "new keys", new_keys=True)


SHAPES = [shape.sized(keys) for shape in _shapes() for keys in ((MANY,) if shape.new_keys else (1, MANY))]
ASYNC_SHAPES = [
    shape
    for shape in SHAPES
    if shape.task.keys == 1
    and shape.task.call == "hit"
    and not (shape.task.tiered or shape.task.rules[0].scope)
]
STEPS = len(SHAPES) + len(ASYNC_SHAPES)
OURS: dict[str, Build] = {HEADGATE: compiled, PLAIN: plain}
SYNC: dict[str, Build] = {FLOOR: decision_floor, **OURS, **PEERS}
ASYNC: dict[str, Build] = {
    **OURS,
    f"{HEADGATE} async": partial(compiled, build=headgate_async),
    f"{PLAIN} async": partial(plain, build=headgate_async),
    **ASYNC_PEERS,
}

Found = Mapping[Shape, Mapping[str, Result]]


def run(scale: Scale, progress: Progress) -> Iterator[Section]:
    """Measure every shape, then those that can be awaited."""
    chosen = [shape for shape in SHAPES if scale.only in shape.name]
    awaited = [shape for shape in ASYNC_SHAPES if scale.only in shape.name]
    progress.steps -= STEPS - len(chosen) - len(awaited)
    yield _sync_section({shape: _measure(shape, SYNC, scale, progress) for shape in chosen})
    if awaited:
        yield _async_section({shape: _measure(shape, ASYNC, scale, progress) for shape in awaited})


class Trial(Here):
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
        """Take a unit of each key, or half of all that there are."""
        take = self.driver.fill or self.driver.hit
        self.loop.run(_call_all(take, self.own * (FEW // 2 if self.shape.task.refused else 1)))

    def verify(self) -> None:
        """Make sure that calls are answered as the shape says."""
        answer, refused = self.loop.run(_call_all(self.driver.hit, self.own[:1])), self.shape.task.refused
        if self.driver.allowed(answer) is refused:
            raise RuntimeError(f"answered {answer} where it should {'refuse' if refused else 'admit'}")

    def sample(self) -> float:
        """Return CPU nanoseconds per call."""
        keys = [f"new:{next(self.numbers)}" for _ in self.keys] if self.shape.new_keys else self.keys
        if self.driver.awaits:
            return self.loop.run(time_awaits(self.driver.hit, keys))
        return self.driver.timer(self.driver.hit, keys)

    def close(self) -> None:
        """Let go of everything."""
        self.driver.close()
        self.loop.close()


async def _call_all(call: Any, keys: Sequence[Any]) -> Any:
    for key in keys:
        answer = call(key)
        if inspect.isawaitable(answer):
            answer = await answer
    return answer


def _measure(
    shape: Shape, contenders: Mapping[str, Build], scale: Scale, progress: Progress
) -> dict[str, Result]:
    progress.begin(shape.name)
    if shape.slides and shape.task.refused:
        _await_room_in_window()

    def make(contender: tuple[str, Build]) -> Here:
        name, build = contender
        args = (build, shape, scale.calls // 2)  # more rounds than usual, each of them shorter
        return There(name, Trial, *args) if name.startswith(PLAIN) else Trial(*args)

    trials = _after("fill", each({name: (name, build) for name, build in contenders.items()}, make))
    if shape.slides:
        time.sleep(SECONDS_APART)
    trials = _after("verify", _after("fill", trials))
    results = interleave(each(trials, lambda trial: partial(trial.ask, "sample")), 3 * scale.rounds, progress)
    _after("close", trials)
    return results


def _after(method: str, trials: Mapping[str, Here | Result]) -> dict[str, Here | Result]:
    """Return the trials after a step with each of them."""

    def take(trial: Here) -> Here:
        trial.ask(method)
        return trial

    return each(trials, take)


def _await_room_in_window() -> None:
    passed = time.time() % MINUTE
    if passed > MINUTE - PREPARATION_SECONDS:
        time.sleep(MINUTE - passed)


def _sync_section(found: Found) -> Section:
    over = {name: _ratios(found, name, FLOOR) for name in OURS}
    peers = {(peer, name): _ratios(found, peer, name) for peer in FULL_PEERS for name in OURS}
    rows = [
        [
            shape.name,
            _judged(over[HEADGATE][shape], shape.over_floor, at_most=True),
            number(over[PLAIN][shape], 2),
            _judged(peers["limits", HEADGATE][shape], shape.under_limits, at_most=False),
            _judged(peers["limits", PLAIN][shape], 1.0, at_most=False),
            *(number(peers[peer, HEADGATE][shape], 1) for peer in FULL_PEERS[1:]),
        ]
        for shape in found
    ]
    headers = ["✗ misses its target", "÷ floor", "plain ÷ floor", "limits ÷", "limits ÷ plain"]
    return Section(
        "decisions",
        tables=[
            _times(
                "CPU ns per call, median; limits has no token bucket, its fixed window stands in", found, SYNC
            ),
            table("The same as ratios", [*headers, *(f"{peer} ÷" for peer in FULL_PEERS[1:])], rows),
            *notes(found.values()),
        ],
        data=_data(found),
        targets=[
            *_targets("{} ÷ floor", "over_floor", over[HEADGATE], at_most=True),
            *_targets("limits ÷ {}", "under_limits", peers["limits", HEADGATE], at_most=False),
            *_plain_target("limits ÷ plain Python, any shape", peers["limits", PLAIN]),
        ],
        panels=[
            Panel(f"{shape.name}: CPU time of one call", "ns", _bars(found[shape]))
            for shape in found
            if shape.task.keys == 1
        ],
    )


def _async_section(found: Found) -> Section:
    ours = {name: _ratios(found, f"{name} async", name) for name in OURS}
    peer = _ratios(found, "limits", f"{PLAIN} async")
    rows = [[shape.name, *(number(ours[name][shape], 2) for name in OURS)] for shape in found]
    return Section(
        "async",
        tables=[
            _times("await hit(key): CPU ns per call, median", found, ASYNC),
            table("Async ÷ sync", ["", *OURS], rows),
            *notes(found.values()),
        ],
        data=_data(found),
        targets=[
            worst_of("async ÷ sync", 1.3, _named(ours[HEADGATE]), at_most=True),
            *_plain_target("limits ÷ plain Python, any shape, async", peer),
        ],
    )


def _ratios(found: Found, over: str, under: str) -> dict[Shape, float]:
    return {shape: results[over].times(results[under]) for shape, results in found.items()}


def _targets(name: str, bound_of: str, ratios: Mapping[Shape, float], at_most: bool) -> Iterator[Target]:
    """Return a target for the shapes of each group that have the same bound."""
    groups: dict[tuple[str, float], dict[Shape, float]] = {}
    for shape, ratio in ratios.items():
        if (bound := getattr(shape, bound_of)) == bound:
            groups.setdefault((shape.group, bound), {})[shape] = ratio
    for (group, bound), members in groups.items():
        sliding = ", sliding" if not at_most and all(shape.slides for shape in members) else ""
        yield worst_of(name.format(group + sliding), bound, _named(members), at_most)


def _plain_target(name: str, ratios: Mapping[Shape, float]) -> Iterator[Target]:
    offered = {shape: ratio for shape, ratio in ratios.items() if shape.task.call != "hold"}
    if offered:
        yield worst_of(name, 1.0, _named(offered), at_most=False)


def _named(ratios: Mapping[Shape, float]) -> dict[str, float]:
    return {shape.name: ratio for shape, ratio in ratios.items()}


def _judged(ratio: float, bound: float, at_most: bool) -> str:
    missed = ratio > bound if at_most else ratio < bound  # false without a bound
    return f"{'✗ ' if missed else ''}{number(ratio, 2 if at_most else 1)}"


def _times(title: str, found: Found, contenders: Sequence[str] | Mapping[str, Build]) -> str:
    return table(
        title,
        ["", *contenders],
        [[shape.name, *(results[name].cell for name in contenders)] for shape, results in found.items()],
    )


def _bars(results: Mapping[str, Result]) -> list[tuple[str, float, str]]:
    return [(name, found.median, number(found.median)) for name, found in results.items() if found.samples]


def _data(found: Found) -> dict[str, object]:
    return {shape.name: results for shape, results in found.items()}
