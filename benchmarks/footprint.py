"""Bytes per key, as tracemalloc counts them; the keys themselves exist before.

A token bucket and a fixed window have one unit taken of each key. A sliding window has been hit in ten of its 60
buckets, in faked time; peers see the same ten hits, with a quarter of the keys to save minutes: dicts grow by doubling,
so a quarter of the keys fills them alike and takes as many bytes per key.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import tracemalloc
from collections.abc import Iterator
from functools import partial
from itertools import product

from benchmarks.contenders import (
    FLOOR,
    HEADGATE,
    PEERS,
    PLAIN,
    Build,
    Driver,
    FakeTime,
    Rule,
    Task,
    decision_floor,
)
from benchmarks.harness import Panel, Progress, Result, Scale, Section, Target, each, notes, number, table
from benchmarks.plain import compiled, plain, run_there

BOUNDS = {"token_bucket": 150.0, "fixed_window": 120.0, "sliding_window": 400.0}
LIVE_BUCKETS = 10
EPOCH = 1_700_000_040.0
CONTENDERS: dict[str, Build] = {FLOOR: decision_floor, HEADGATE: compiled, PLAIN: plain, **PEERS}
STEPS = len(BOUNDS) * len(CONTENDERS)


def run(scale: Scale, progress: Progress) -> Iterator[Section]:
    """Measure every contender with every rule kind."""
    found: dict[str, dict[str, Result]] = {kind: {} for kind in BOUNDS}
    for kind, name in product(BOUNDS, CONTENDERS):
        progress.begin(f"bytes per key: {kind}, {name}")
        fewer = kind == "sliding_window" and name in PEERS
        keys = [f"user:{i}" for i in range(scale.keys // 4 if fewer else scale.keys)]
        measure = partial(run_there, _bytes_per_key) if name == PLAIN else _bytes_per_key
        found[kind] |= each({name: partial(measure, CONTENDERS[name], kind, keys)}, lambda count: count())
    rows = [[name, *(found[kind][name].cell for kind in BOUNDS)] for name in CONTENDERS]
    yield Section(
        "bytes per key",
        tables=[
            table(f"Bytes per key, {scale.keys:,} keys", ["", *BOUNDS], rows),
            *notes(found.values()),
        ],
        data=dict(found),
        targets=[
            Target(f"bytes per {kind} key", bound, found[kind][HEADGATE].median, True, f"{scale.keys:,} keys")
            for kind, bound in BOUNDS.items()
        ],
        panels=[
            Panel(
                f"{kind}: bytes per key, {scale.keys:,} keys",
                "B",
                [(n, r.median, number(r.median)) for n, r in results.items() if r.samples],
            )
            for kind, results in found.items()
        ],
    )


def _bytes_per_key(build: Build, kind: str, keys: list[str]) -> Result:
    clock = FakeTime(EPOCH)
    task = Task((Rule(kind, 1000),), keys=len(keys), clock=clock)
    build(task).close()  # what it imports is not part of any key
    with clock.patched(), asyncio.Runner() as loop:
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            driver = build(task)
            for _ in range(LIVE_BUCKETS if kind == "sliding_window" else 1):
                loop.run(_hit_all(driver, keys))
                clock.seconds += 60
            gc.collect()
            taken = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        driver.close()
    return Result([taken / len(keys)])


async def _hit_all(driver: Driver, keys: list[str]) -> None:
    for key in keys:
        answer = driver.hit(key)
        if inspect.isawaitable(answer):
            await answer
