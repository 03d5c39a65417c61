"""`python -m benchmarks.long_logs [--quick]`: what a call costs on a full sliding log, by its length.

The same whatever the length, it is promised. With every hit or hold one entry expires and one comes. In Redis and
PostgreSQL it is the time of one caller, over loopback; `sqlite.py` measures CPU time on a file.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.harness import FULL, QUICK, Progress, Scale, Section, interleave, number, table, worst_of
from headgate import Limiter, sliding_log
from headgate.stores import Store
from headgate.testing import FakeClock

SIZES = (1_000, 10_000, 100_000)
CALLS = ("hit", "refused hit", "check", "hold + release")


class FullLog:
    """A log that is full: an entry for each of the last so many seconds; the store goes by that clock."""

    def __init__(self, store: Store | str, clock: FakeClock, size: int, now_ns: Callable[[], int]) -> None:
        self._clock = clock
        self._now_ns = now_ns
        self._limiter = Limiter(
            sliding_log(f"{size}/{size}s"), name=f"log of {size}", store=store, clock=clock
        )
        for _ in range(size):
            self._clock.advance(1)
            self._call("hit")

    def time(self, name: str, calls: int) -> float:
        """Return microseconds per call."""
        worked = 0
        for _ in range(calls):
            if name in ("hit", "hold + release"):
                self._clock.advance(1)
            started = self._now_ns()
            self._call(name)
            worked += self._now_ns() - started
            if name == "hold + release":
                self._limiter.hit("user:0")
        return worked / calls / 1000

    def _call(self, name: str) -> None:
        if name == "check":
            admitted = self._limiter.check("user:0").allowed
        elif name == "hold + release":
            hold = self._limiter.hold("user:0")
            admitted = hold.decision.allowed
            hold.release()
        else:
            admitted = self._limiter.hit("user:0").allowed
        if admitted is (name in ("check", "refused hit")):
            raise RuntimeError(f"{name}: answered {admitted}")


def measure(store: str, unit: str, logs: Sequence[FullLog], scale: Scale, progress: Progress) -> Section:
    """Measure all calls on some logs, from the shortest to the longest."""
    names = [f"{size:,} entries" for size in SIZES[: len(logs)]]
    measured = {
        call: interleave(
            {name: partial(log.time, call, scale.calls // 20) for name, log in zip(names, logs, strict=True)},
            scale.rounds,
            progress,
        )
        for call in CALLS
    }
    rows = [[name, *(number(found[name].median, 1) for found in measured.values())] for name in names]
    growth = {call: found[names[-1]].times(found[names[0]]) for call, found in measured.items()}
    return Section(
        f"{store}, long logs",
        tables=[table(f"{store}, full sliding_log: {unit} per call, median", ["", *measured], rows)],
        data=dict(measured),
        targets=[worst_of(f"{store}, {names[-1]} ÷ {names[0]}", 1.5, growth, at_most=True)],
    )


def main() -> None:
    """Measure and print; nothing is kept."""
    from benchmarks.postgres import database_url
    from benchmarks.redis import server_url

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a rough look: shorter logs, fewer calls and rounds"
    )
    scale = QUICK if parser.parse_args().quick else FULL
    servers: dict[str, Any] = {"Redis": server_url, "PostgreSQL": database_url}
    progress = Progress(len(servers))
    for name, open_server in servers.items():
        progress.begin(name)
        with open_server() as url:
            logs = [
                FullLog(url, FakeClock(), size, time.perf_counter_ns) for size in SIZES if size <= scale.keys
            ]
            print(*measure(name, "µs", logs, scale, progress).tables, sep="\n", flush=True)
        progress.end()


if __name__ == "__main__":
    main()
