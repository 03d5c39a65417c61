"""Bytes per key, measured with tracemalloc, without the keys themselves.

In token buckets and fixed windows, one unit of each key is taken. Sliding windows are hit in ten of their 60 buckets, in
faked time. Peers get the same ten hits but, to save time, only a quarter of the keys: dicts grow by doubling, so they are as
full, and take as many bytes per key, with a quarter of the keys.
"""

from __future__ import annotations

import gc
import tracemalloc
from functools import partial

from benchmarks.contenders import FLOOR, PEERS, PLAIN, Build, FakeTime, Rule, Task, decision_floor
from benchmarks.harness import HEADGATE, Result, Scale, Section, Target, announce, each, notes, table
from benchmarks.plain import OURS, run_there

BOUNDS = {"token_bucket": 150.0, "fixed_window": 120.0, "sliding_window": 400.0}
LIVE_BUCKETS = 10
EPOCH = 1_700_000_040.0
CONTENDERS: dict[str, Build] = {FLOOR: decision_floor, **OURS, **PEERS}


def measure(scale: Scale) -> Section:
    """Measure every contender with every rule kind."""
    found: dict[str, dict[str, Result]] = {}
    for kind in BOUNDS:
        announce(f"bytes per key: {kind}")
        counts = {name: partial(_count, name, kind, scale.keys) for name in CONTENDERS}
        found[kind] = each(counts, lambda count: Result([count()]))
    rows = [[name, *(found[kind][name].cell for kind in BOUNDS)] for name in CONTENDERS]
    return Section(
        "bytes per key",
        [table(f"Bytes per key, {scale.keys:,} keys", ["", *BOUNDS], rows), *notes(*found.values())],
        dict(found),
        [
            Target(f"bytes per {kind} key", bound, found[kind][HEADGATE].median, True)
            for kind, bound in BOUNDS.items()
        ],
    )


def _count(name: str, kind: str, keys: int) -> float:
    fewer = 4 if kind == "sliding_window" and name in PEERS else 1
    measured = partial(run_there, _bytes_per_key) if name == PLAIN else _bytes_per_key
    return measured(CONTENDERS[name], kind, [f"user:{i}" for i in range(keys // fewer)])


def _bytes_per_key(build: Build, kind: str, keys: list[str]) -> float:
    clock = FakeTime(EPOCH)
    task = Task((Rule(kind, 1000),), keys=len(keys), clock=clock)
    build(task).close()  # imports now, so that they are not counted
    with clock.patched():
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            driver = build(task)
            for _ in range(LIVE_BUCKETS if kind == "sliding_window" else 1):
                for key in keys:
                    driver.hit(key)
                clock.seconds += 60
            gc.collect()
            taken = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        driver.close()
    return taken / len(keys)
