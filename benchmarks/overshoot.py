"""How many a sliding window admits in the worst span as long as its period, divided by the limit.

The trace is the worst one for counters of two windows: a full burst somewhere in a window, then as much as is admitted,
as early as possible, for three periods. Several places of the burst are tried; the worst counts. Time is faked.
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
"""Where in the window the trace begins."""
STEP = PERIOD / 997
"""Between two tries; no multiple of anybody's bucket."""


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
