"""Four threads on one limiter with two rules: the calls of all together beside those of one, and how evenly they are shared.

By the wall clock, because threads that wait for each other use no CPU time; and by CPU time, because on a busy machine four
threads are given more of it than one. The worse of the two counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from benchmarks.contenders import HEADGATE, PEERS, PLAIN, Build, Rule, Task
from benchmarks.harness import (
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
    worst_of,
)
from benchmarks.plain import Here, There, compiled, plain

THREADS = 4
SECONDS = 0.5
"""Of a sample; the interpreter lets each thread run for 5 ms at a time."""
KEYS = [f"user:{i}" for i in range(100)]
"""Of a batch; after each one a thread looks whether time is up."""
KINDS = ("fixed_window", "sliding_window")
CONTENDERS: dict[str, Build] = {HEADGATE: compiled, PLAIN: plain, "limits": PEERS["limits"]}
STEPS = len(KINDS)


class Run(NamedTuple):
    """What threads did: the calls of each, and the time of all."""

    calls: list[int]
    seconds: float
    cpu_seconds: float


class Crowd(Here):
    """A limiter, and threads that call it."""

    def __init__(self, build: Build, kind: str) -> None:
        task = Task((Rule(kind, 1_000_000_000, 60), Rule(kind, 1_000_000_000, 3600)), keys=len(KEYS))
        self.hit = build(task).hit

    def sample(self) -> tuple[float, float]:
        """Return the calls of several threads over those of one, and the least of a thread over the most."""
        alone, together = self.run(1), self.run(THREADS)
        calls = sum(together.calls) / sum(alone.calls)
        worse = calls * min(alone.seconds / together.seconds, alone.cpu_seconds / together.cpu_seconds)
        return worse, min(together.calls) / max(together.calls)

    def run(self, threads: int) -> Run:
        """Let so many threads call until time is up."""
        calls = [0] * threads
        start = threading.Barrier(threads)

        def work(index: int) -> None:
            hit, batches = self.hit, 0
            start.wait()
            until = time.perf_counter() + SECONDS
            while time.perf_counter() < until:
                for key in KEYS:
                    hit(key)
                batches += 1
            calls[index] = batches * len(KEYS)

        workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
        started, worked = time.perf_counter(), time.process_time()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return Run(calls, time.perf_counter() - started, time.process_time() - worked)


def run(scale: Scale, progress: Progress) -> Iterator[Section]:
    """Measure two rules of each kind."""
    throughputs: dict[str, dict[str, Result]] = {}
    shares: dict[str, dict[str, Result]] = {}
    for kind in KINDS:
        progress.begin(f"{THREADS} threads: two {kind}s")
        throughputs[kind], shares[kind] = _measure(kind, scale, progress)
    rows = [
        [f"two {kind}s: {name}", number(found.median, 2), number(shares[kind][name].median, 2)]
        for kind in KINDS
        for name, found in throughputs[kind].items()
    ]
    yield Section(
        "threads",
        tables=[
            table(
                f"{THREADS} threads",
                ["", "their calls ÷ those of one thread", "least ÷ most calls of a thread"],
                rows,
            ),
            *notes(throughputs.values()),
        ],
        data={"throughput over one thread": throughputs, "least over most": shares},
        targets=[
            _target(f"{THREADS} threads: calls ÷ those of one", 0.8, throughputs),
            _target(f"{THREADS} threads: least ÷ most calls", 0.5, shares),
        ],
    )


def _target(name: str, bound: float, found: dict[str, dict[str, Result]]) -> Target:
    ratios = {f"two {kind}s": results[HEADGATE].median for kind, results in found.items()}
    return worst_of(name, bound, ratios, at_most=False)


def _measure(kind: str, scale: Scale, progress: Progress) -> tuple[dict[str, Result], dict[str, Result]]:
    shares = {name: Result() for name in CONTENDERS}

    def make(contender: tuple[str, Build]) -> Here:
        name, build = contender
        return There(name, Crowd, build, kind) if name == PLAIN else Crowd(build, kind)

    def sample(name: str, crowd: Here) -> float:
        throughput, share = crowd.ask("sample")
        shares[name].samples.append(share)
        return float(throughput)

    crowds = each({name: (name, build) for name, build in CONTENDERS.items()}, make)
    runners = {
        name: crowd if isinstance(crowd, Result) else partial(sample, name, crowd)
        for name, crowd in crowds.items()
    }
    return interleave(runners, scale.rounds, progress), shares
