"""Leases on Redis: their speed beside memory, store calls of sixteen processes, and admissions under kills.

    python -m benchmarks.leases [--quick]
    python -m benchmarks.leases kills [decisions]

The second command makes real decisions in processes that it kills, stops and continues, and compares the admissions in every
period with the limit. It ends after the given number of decisions, by default 10,000,000.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from itertools import accumulate
from mmap import mmap
from multiprocessing.process import BaseProcess
from typing import Any

import redis

from benchmarks.harness import Scale, Section, Target, announce, interleave, main, number, table
from headgate import Limiter, sliding_window
from headgate.testing.servers import RedisServer

UNLIMITED = sliding_window("1000000000/minute")
PROCESSES = 16
WORKERS = 4
PERIOD = 10
LIMIT = 300_000
LONGEST = 3_600_000
"""Maximum duration of a run with kills, in milliseconds."""

_fork = multiprocessing.get_context("fork")


def run(scale: Scale) -> Iterator[Section]:
    """Measure one process, then sixteen."""
    with RedisServer() as server:
        yield _speed(scale, server.url)
        yield _store_calls(scale, server.url)


def _speed(scale: Scale, url: str) -> Section:
    announce("leases: one hot key, one process")
    calls = 20 * scale.calls
    with (
        Limiter(UNLIMITED) as memory,
        Limiter(UNLIMITED, name="speed", store=url, lease="1s") as leased,
        Limiter(UNLIMITED, name="exact", store=url) as exact,
    ):
        runners: dict[str, Callable[[], float]] = {
            "memory": lambda: _rate(memory, calls),
            "Redis, leased": lambda: _rate(leased, calls),
            "Redis": lambda: _rate(exact, calls // 100),
        }
        rates = interleave(runners, scale.rounds)
    rows = [[name, rate.cell] for name, rate in rates.items()]
    ratio = rates["Redis, leased"].times(rates["memory"])
    return Section(
        "one process",
        [table("Decisions per second of CPU time on one hot key", ["", "one process"], rows)],
        {name: rate.samples for name, rate in rates.items()},
        [Target("leased on Redis ÷ memory", 0.5, ratio, at_most=False)],
    )


def _rate(limiter: Limiter, calls: int) -> float:
    """Return calls per second of CPU time, without the waits for the store; `_store_calls` counts the calls of the store."""
    hit = limiter.hit
    start = time.thread_time()
    for _ in range(calls):
        hit("hot")
    return calls / (time.thread_time() - start)


def _store_calls(scale: Scale, url: str) -> Section:
    announce(f"leases: one hot key, {PROCESSES} processes")
    share = 10 * scale.calls
    client = redis.Redis.from_url(url)
    client.config_resetstat()

    def work() -> None:
        with Limiter(UNLIMITED, name="calls", store=url, lease="1s") as limiter:
            _rate(limiter, share)

    workers = [_fork.Process(target=work) for _ in range(PROCESSES)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    stats: Any = client.info("commandstats")
    calls = sum(
        found["calls"] for name, found in stats.items() if name in ("cmdstat_evalsha", "cmdstat_eval")
    )
    decisions = PROCESSES * share
    rows = [["decisions", number(decisions)], ["store calls", number(calls)]]
    return Section(
        f"{PROCESSES} processes",
        [table(f"One hot key, {PROCESSES} processes", ["", "number"], rows)],
        {"decisions": decisions, "calls": calls},
        [Target("store calls per decision", 0.01, calls / decisions, at_most=True)],
    )


class Record:
    """Admissions of a process per millisecond, in memory that outlives it.

    An admission is recorded only if the millisecond is the same before and after the call, because the time of an admission
    is unknown if the process was stopped during the call.
    """

    def __init__(self, start: float) -> None:
        self.start = start
        self.shared = mmap(-1, 4 * (LONGEST + 2))
        self.counts = memoryview(self.shared).cast("I")

    def fill(self, limiter: Limiter) -> None:
        """Hit until the process is killed."""
        counts, start, clock, hit = self.counts, self.start, time.time, limiter.hit
        while True:
            before = int((clock() - start) * 1000)
            decision = hit("hot")
            counts[LONGEST] += 1
            if decision.allowed and int((clock() - start) * 1000) == before:
                counts[before] += 1
            elif not decision.allowed:
                time.sleep(min(0.05, decision.retry_after or 0.05))


def kills(decisions: int) -> int:
    """Make real decisions in processes that are killed, stopped and continued; return the exit code."""
    rule, rng, faults, retired = sliding_window(f"{LIMIT}/{PERIOD}s"), random.Random(1), 0, 0
    totals = array("Q", bytes(8 * LONGEST))
    with RedisServer() as server:
        records = [Record(time.time()) for _ in range(WORKERS)]
        for record in records:
            record.start = records[0].start

        def work(record: Record) -> None:
            record.fill(Limiter(rule, name="kills", store=server.url, lease=PERIOD / 20))

        def begin(record: Record) -> BaseProcess:
            worker = _fork.Process(target=work, args=(record,), daemon=True)
            worker.start()
            return worker

        workers = [begin(record) for record in records]
        while (made := retired + sum(record.counts[LONGEST] for record in records)) < decisions:
            time.sleep(rng.uniform(0.1, 0.6))
            faults += 1
            place = rng.randrange(WORKERS)
            pid = workers[place].pid
            assert pid is not None
            if rng.random() < 0.5:
                os.kill(pid, signal.SIGKILL)
                workers[place].join()
                workers[place] = begin(records[place])
            else:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(rng.uniform(0, 1.5 * PERIOD / 20))
                os.kill(pid, signal.SIGCONT)
            if faults % 100 == 0:
                announce(f"{made:,} decisions, {faults} faults")
        for worker in workers:
            worker.kill()
            worker.join()
    for record in records:
        for at, units in enumerate(record.counts[:LONGEST]):
            if units:
                totals[at] += units
    sums = [0, *accumulate(totals)]
    period = PERIOD * 1000
    most = max(sums[at + period] - sums[at] for at in range(LONGEST - period))
    used = [at for at, units in enumerate(totals) if units]
    seconds = (used[-1] - used[0]) / 1000
    print(
        f"{made:,} decisions by {WORKERS} processes, {sums[-1]:,} certainly admitted in {seconds:,.0f} s, {faults} faults: "
        f"at most {most:,} in {PERIOD} s, limit {LIMIT:,}"
    )
    return int(most > LIMIT)


if __name__ == "__main__":
    if sys.argv[1:2] == ["kills"]:
        sys.exit(kills(int((sys.argv[2:] or ["10000000"])[0])))
    main("leases", __doc__, run)
