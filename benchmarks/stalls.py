"""A million keys, and the slowest single call while old keys expire and new ones come.

First a million keys arrive, one hit each. Then all of them have expired at once, and a million others arrive: every bit
of expiry work falls into this second half. Time is faked, so the halves are as bad as they can be.

Each call is timed by itself: CPU time, because on a shared machine the wall clock shows the other processes; the
worst of the wall clock is shown beside it. A plain dict that is given the same keys shows what growing costs anybody: now
and then all of its entries move, and the call that it happens in waits for that, ours as well. So expiry work is also
timed alone, which is what the target is about.

The garbage collector is off, as everywhere, and then on: what it has to look through is part of a user's stalls.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from unittest import mock

from benchmarks.contenders import FakeTime, Rule, headgate
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
Expiry = list[int]
"""How long the expiry work of each call took, in nanoseconds."""

Build = Callable[[], tuple[Hit, FakeTime, Expiry]]
KINDS = ("token_bucket", "fixed_window", "sliding_window")
STALL_MS = 5.0
"""What "a few milliseconds" means here."""


@dataclass(frozen=True)
class Latencies:
    """Of the calls of one half, in microseconds."""

    median: float
    p999: float
    worst: float
    worst_wall: float
    worst_expiry: float
    """Of the expiry work in a call."""


def run(scale: Scale, progress: Progress) -> Iterator[Section]:
    """Measure a plain dict, then ours with each rule kind."""
    keys = [f"user:{i}" for i in range(10 * scale.keys)]
    halves: dict[str, tuple[Latencies, Latencies] | Result] = {}
    for name, build in BUILDERS.items():
        progress.begin(f"{len(keys):,} keys: {name}")
        halves.update(each({name: build}, partial(_measure, keys=keys, collect=name.endswith(WITH_GC))))
    troubles = {name: found for name, found in halves.items() if isinstance(found, Result)}
    measured = {name: found for name, found in halves.items() if not isinstance(found, Result)}
    stalls = {kind: measured[kind][1].worst_expiry / 1000 for kind in KINDS if kind in measured}
    yield Section(
        "stalls",
        tables=[_table(measured, len(keys)), *notes([troubles])],
        data={name: [asdict(half) for half in found] for name, found in measured.items()},
        targets=[
            Target(
                f"longest expiry work in a call, ms: {kind}",
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
    headers = ["", "", "median", "99.9 %", "worst", "worst by the wall clock", "longest expiry work"]
    return table(f"One call among {count:,} keys, CPU µs", headers, rows)


def _dict() -> tuple[Hit, FakeTime, Expiry]:
    plain: dict[str, int] = {}
    return lambda key: plain.setdefault(key, 1), FakeTime(0), []


def _limiter(kind: str) -> tuple[Hit, FakeTime, Expiry]:
    from headgate.stores.counters import Table

    clock = FakeTime(1_700_000_000.0)
    driver = headgate(Rule(kind, 10, 60, clock=clock))
    took: Expiry = []
    look_at, cpu_clock = Table.look_at, time.thread_time_ns

    def timed(table: Table, most: int) -> None:
        start = cpu_clock()
        look_at(table, most)
        took.append(cpu_clock() - start)

    mock.patch.object(Table, "look_at", timed).start()
    return driver.hit, clock, took


WITH_GC = ", collector on"
BUILDERS: dict[str, Build] = {
    "plain dict": _dict,
    **{kind: partial(_limiter, kind) for kind in KINDS},
    **{kind + WITH_GC: partial(_limiter, kind) for kind in KINDS},
}
STEPS = len(BUILDERS)


def _measure(build: Build, keys: Sequence[str], collect: bool) -> tuple[Latencies, Latencies]:
    hit, clock, expiry = build()
    others = [f"other:{key}" for key in keys]
    try:
        with no_collections():
            if collect:
                gc.enable()
            arriving = _latencies(hit, keys, expiry)
            clock.seconds += 3600
            return arriving, _latencies(hit, others, expiry)
    finally:
        mock.patch.stopall()


def _latencies(hit: Hit, keys: Sequence[str], expiry: Expiry) -> Latencies:
    expiry.clear()
    cpu_clock, wall_clock = time.thread_time_ns, time.perf_counter_ns
    calls, worst_wall = [], 0
    for key in keys:
        wall, cpu = wall_clock(), cpu_clock()
        hit(key)
        calls.append(cpu_clock() - cpu)
        worst_wall = max(worst_wall, wall_clock() - wall)
    calls.sort()
    own = _cost_of_timing(cpu_clock)
    median, p999, worst = calls[len(calls) // 2], calls[-1 - len(calls) // 1000], calls[-1]
    longest = max(expiry, default=own) - own
    return Latencies(*(ns / 1000 for ns in (median - own, p999 - own, worst - own, worst_wall, longest)))


def _cost_of_timing(clock: Callable[[], int]) -> int:
    costs = sorted(-(clock() - clock()) for _ in range(1000))
    return costs[500]
