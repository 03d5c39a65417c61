"""How many a sliding window admits in the worst span as long as its period, divided by the limit.

The trace is the one that counters of two windows fear: a full burst somewhere in a window, then as much as is admitted,
as early as possible, for three periods. Several places of the burst are tried; the worst counts. Time is faked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import partial

from benchmarks.contenders import FULL_PEERS, HEADGATE, PEERS, Build, FakeTime, Rule, Task, headgate
from benchmarks.harness import Panel, Progress, Result, Scale, Section, Target, each, notes, number, table

LIMIT, PERIOD = 100, 60
EPOCH = 1_700_000_040.0
"""The start of a window: a multiple of the period."""
BURSTS = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999)
"""Where in the window the trace begins."""
STEP = PERIOD / 997
"""Between two tries; no multiple of anybody's bucket."""
STEPS = 1


def run(scale: Scale, progress: Progress) -> Iterator[Section]:
    """Run the trace against every sliding window."""
    progress.begin("rolling window: the worst span")
    contenders = {HEADGATE: headgate, **{name: PEERS[name] for name in FULL_PEERS}}
    spans = {
        f"{name}: {kind}": partial(_worst_span, build, kind)
        for name, build in contenders.items()
        for kind in ("sliding_window", "sliding_log")
    }
    bursts = BURSTS if scale.rounds > 3 else BURSTS[-2:]
    worst = each(spans, lambda span: Result([max(span(at) for at in bursts)]))
    rows = [
        [name, result.trouble.partition(":")[0] or number(result.median, 2)] for name, result in worst.items()
    ]
    ours = worst[f"{HEADGATE}: sliding_window"].median
    yield Section(
        "rolling window",
        tables=[
            table("Most admitted in any span of one period, ÷ limit", ["", "worst"], rows),
            *notes([worst]),
        ],
        data=dict(worst),
        targets=[Target("most in a rolling window ÷ limit", 1.0, ours, True, "sliding_window")],
        panels=[
            Panel(
                "Most admitted in any span of one period, ÷ limit",
                "",
                [
                    (name, result.median, number(result.median, 2))
                    for name, result in worst.items()
                    if result.samples
                ],
            )
        ],
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
