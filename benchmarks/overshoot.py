"""The highest number of admissions of a sliding window in any span of one period, divided by the limit.

The trace is the worst case for algorithms with counters of two windows: a full burst at some time of a window, then as many
hits as are admitted, as early as possible, for three periods. Several times of the burst are tried. Time is faked.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial

from benchmarks.contenders import PEERS, Build, FakeTime, Rule, Task, headgate
from benchmarks.harness import HEADGATE, Result, Scale, Section, Target, announce, each, notes, number, table

LIMIT, PERIOD = 100, 60
EPOCH = 1_700_000_040.0
"""The start of a window: a multiple of the period."""
BURSTS = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999)
"""Times of the burst in the window, as shares of the period."""
STEP = PERIOD / 997
"""Seconds between two series of hits. It is not a multiple of any contender's bucket."""


def measure(scale: Scale) -> Section:
    """Run the trace against every sliding window."""
    announce("rolling window: the worst span")
    spans = {
        f"{name}: {kind}": partial(_worst_span, build, kind)
        for name, build in {HEADGATE: headgate, **PEERS}.items()
        for kind in ("sliding_window", "sliding_log")
    }
    bursts = BURSTS if scale.rounds > 3 else BURSTS[-2:]
    tried = each(spans, lambda span: Result([max(span(at) for at in bursts)]))
    rows = [
        [name, result.trouble.partition(":")[0] or number(result.median, 2)] for name, result in tried.items()
    ]
    ours = tried[f"{HEADGATE}: sliding_window"].median
    return Section(
        "rolling window",
        [table("Most admitted in any span of one period, ÷ limit", ["", "worst"], rows), *notes(tried)],
        dict(tried),
        [Target("most in a rolling window ÷ limit", 1.0, ours, True, "sliding_window")],
    )


def _worst_span(build: Build, kind: str, burst_at: float) -> float:
    clock = FakeTime(EPOCH + PERIOD * burst_at)
    with clock.patched():
        driver = build(Task((Rule(kind, LIMIT, PERIOD),), clock=clock))
        times: list[float] = []
        for step in range(round(3 * PERIOD / STEP)):
            clock.seconds = EPOCH + PERIOD * burst_at + step * STEP
            while driver.allowed(driver.hit("user:0")):
                times.append(clock.seconds)
        driver.close()
    # Half-open spans, starting at each admitted unit.
    return max(bisect_left(times, start + PERIOD) - first for first, start in enumerate(times)) / LIMIT
