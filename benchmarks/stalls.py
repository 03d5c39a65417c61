"""A million keys, and the slowest single call while old keys expire and new ones come.

First a million keys arrive, one hit each. Then all of them have expired at once, and a million others arrive: every bit
of expiry work falls into this second half. Time is faked, so the halves are as bad as they can be.

Each call is timed by itself: CPU time, because on a shared machine the wall clock shows the other processes; the
worst of the wall clock is shown beside it. Even CPU time has spikes that are not ours, so everything is done twice from
the start, with the same keys in the same order, and of each call the shorter time counts: what the call itself does takes
its time in both.

A plain dict that is given the same keys shows what growing costs: now and then all of its entries move, and one call waits
for that.

The garbage collector is off, as everywhere, and then, in one run only, on: what it has to look through is part of a user's
stalls.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from benchmarks.contenders import FakeTime, Rule, Task, headgate
from benchmarks.harness import (
    Progress,
    Result,
    Scale,
    Section,
    Target,
    each,
    no_collections,
    notes,
    number,
    table,
)

Hit = Callable[[str], object]
Build = Callable[[], tuple[Hit, FakeTime]]
KINDS = ("token_bucket", "fixed_window", "sliding_window")
STALL_MS = 5.0
"""What "a few milliseconds" means here."""
RUNS = 2


@dataclass(frozen=True)
class Latencies:
    """Of the calls of one half, in microseconds."""

    median: float
    p999: float
    worst: float
    worst_wall: float


def run(scale: Scale, progress: Progress) -> Iterator[Section]:
    """Measure a plain dict, then ours with each rule kind."""
    keys = [f"user:{i}" for i in range(10 * scale.keys)]
    halves: dict[str, tuple[Latencies, Latencies] | Result] = {}
    for name, build in BUILDERS.items():
        progress.begin(f"{len(keys):,} keys: {name}")
        halves.update(each({name: build}, partial(_measure, keys=keys, collect=name.endswith(WITH_GC))))
    troubles = {name: found for name, found in halves.items() if isinstance(found, Result)}
    measured = {name: found for name, found in halves.items() if not isinstance(found, Result)}
    stalls = {kind: max(half.worst for half in measured[kind]) / 1000 for kind in KINDS if kind in measured}
    yield Section(
        "stalls",
        tables=[_table(measured, len(keys)), *notes([troubles])],
        data={name: [asdict(half) for half in found] for name, found in measured.items()},
        targets=[
            Target(
                f"longest call, ms: {kind}",
                STALL_MS,
                stalls.get(kind, float("nan")),
                at_most=True,
                where=f"{len(keys):,} keys",
            )
            for kind in KINDS
        ],
    )


def _table(measured: dict[str, tuple[Latencies, Latencies]], count: int) -> str:
    rows = [
        [name, title, *(number(value, 1) for value in asdict(half).values())]
        for name, halves in measured.items()
        for title, half in zip((f"{count:,} arrive", "others arrive, those expire"), halves, strict=True)
    ]
    headers = ["", "", "median", "99.9 %", "worst", "worst by the wall clock"]
    return table(f"One call among {count:,} keys, CPU µs", headers, rows)


def _dict() -> tuple[Hit, FakeTime]:
    plain: dict[str, int] = {}
    return lambda key: plain.setdefault(key, 1), FakeTime(0)


def _limiter(kind: str) -> tuple[Hit, FakeTime]:
    clock = FakeTime(1_700_000_000.0)
    return headgate(Task((Rule(kind, 10, 60),), clock=clock)).hit, clock


WITH_GC = ", collector on"
BUILDERS: dict[str, Build] = {
    "plain dict": _dict,
    **{kind: partial(_limiter, kind) for kind in KINDS},
    **{kind + WITH_GC: partial(_limiter, kind) for kind in KINDS},
}
STEPS = len(BUILDERS)


def _measure(build: Build, keys: Sequence[str], collect: bool) -> tuple[Latencies, Latencies]:
    halves = (keys, [f"other:{key}" for key in keys])
    runs = [[array("q"), array("q")] for _ in range(1 if collect else RUNS)]
    walls = [0, 0]
    for times in runs:
        hit, clock = build()
        with no_collections():
            if collect:
                gc.enable()
            for i, half in enumerate(halves):
                walls[i] = max(walls[i], _time_each(hit, half, times[i]))
                clock.seconds += 3600
    first, second = (
        _latencies([min(calls) for calls in zip(*(times[i] for times in runs), strict=True)], walls[i])
        for i in range(len(halves))
    )
    return first, second


def _time_each(hit: Hit, keys: Sequence[str], times: array[int]) -> int:
    """Add the CPU nanoseconds of each call, and return those of the longest by the wall clock."""
    cpu_clock, wall_clock, note = time.thread_time_ns, time.perf_counter_ns, times.append
    worst_wall = 0
    for key in keys:
        wall, cpu = wall_clock(), cpu_clock()
        hit(key)
        note(cpu_clock() - cpu)
        worst_wall = max(worst_wall, wall_clock() - wall)
    return worst_wall


def _latencies(calls: list[int], worst_wall: int) -> Latencies:
    calls.sort()
    own = _cost_of_timing(time.thread_time_ns)
    median, p999, worst = calls[len(calls) // 2], calls[-1 - len(calls) // 1000], calls[-1]
    return Latencies(*(ns / 1000 for ns in (median - own, p999 - own, worst - own, worst_wall)))


def _cost_of_timing(clock: Callable[[], int]) -> int:
    costs = sorted(-(clock() - clock()) for _ in range(1000))
    return costs[500]
