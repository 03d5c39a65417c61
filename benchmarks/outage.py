"""`python -m benchmarks.outage [--quick]`: how long calls take while a Redis server does not answer.

Tasks, then threads, call a limiter at a steady pace. In their midst the server is stopped (SIGSTOP: connections stay open,
nothing is answered) or killed, and is back some seconds later. Counted is every call that began or ended meanwhile: the
longest, and the 99th percentile; then, after how many seconds the first decision is the server's again.

The row in memory does the same with a limiter that has no server: what it shows is the machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.harness import (
    FULL,
    QUICK,
    Progress,
    Scale,
    Section,
    Target,
    number,
    table,
    target_table,
    worst_of,
    write_json,
)
from headgate import AsyncLimiter, Limiter, StoreError, local
from headgate.testing.servers import RedisServer

Outage = Literal["stopped", "killed"]
Workers = Literal["tasks", "threads"]

DEADLINE = 0.25
GRACE_MS = 50.0
PAUSE = 0.005
"""Seconds between two calls of a worker."""
CROWD = {"tasks": 64, "threads": 32}
POLICIES: dict[str, Any] = {"open": "open", "closed": "closed", "local": local(share=0.25), "raise": "raise"}
MEMORY = "in memory"
BEFORE = 0.5
PATIENCE = 5.0
"""Seconds for which the first decision of a server that is back is waited for."""


@dataclass
class Calls:
    """What workers have seen."""

    began: list[float]
    ended: list[float]
    is_counted: list[bool]
    """Whether the store has decided."""

    def add(self, began: float, is_counted: bool) -> None:
        """Take note of a call that has just ended."""
        self.began.append(began)
        self.ended.append(time.perf_counter())
        self.is_counted.append(is_counted)


@dataclass(frozen=True)
class Found:
    """What calls did in an outage; times in milliseconds but for `back_after`, in seconds."""

    calls: int
    longest: float
    p99: float
    back_after: float


def run(scale: Scale, progress: Progress) -> Iterator[Section]:
    """Measure every policy, with tasks and with threads, while the server is stopped and while it is dead."""
    seconds = 5.0 if scale is FULL else 2.5
    found: dict[str, Found] = {}
    for workers in CROWD:
        for name, policy in {**POLICIES, MEMORY: None}.items():
            for outage in ("stopped", "killed") if policy else ("stopped",):
                progress.begin(f"outage: {workers}, {name}, {outage}")
                case = f"{workers}, {name}" + (f", {outage}" if policy else "")
                found[case] = _measure(workers, policy, outage, seconds)  # type: ignore[arg-type]
    ours = {case: one for case, one in found.items() if MEMORY not in case}
    rows = [
        [case, number(one.calls), number(one.longest, 1), number(one.p99, 3), number(one.back_after, 2)]
        for case, one in found.items()
    ]
    yield Section(
        "outage",
        tables=[
            table(
                f"Redis away for {seconds:g} s, deadline {DEADLINE * 1000:g} ms",
                ["", "calls", "longest, ms", "p99, ms", "back after, s"],
                rows,
            )
        ],
        data={case: vars(one) for case, one in found.items()},
        targets=[
            worst_of(
                "outage: longest call, ms",
                DEADLINE * 1000 + GRACE_MS,
                {case: one.longest for case, one in ours.items()},
                at_most=True,
            ),
            worst_of("outage: p99, ms", 1.0, {case: one.p99 for case, one in ours.items()}, at_most=True),
            worst_of(
                "outage: seconds until the server counts again",
                1.0,
                {case: one.back_after for case, one in ours.items()},
                at_most=True,
            ),
        ],
    )


def _measure(workers: Workers, policy: Any, outage: Outage, seconds: float) -> Found:
    calls, stop, spans = Calls([], [], []), threading.Event(), [0.0, 0.0]
    with RedisServer() as server:
        begin, end = (server.pause, server.resume) if outage == "stopped" else (server.kill, server.start)

        def disturb() -> None:
            time.sleep(BEFORE)
            spans[0] = time.perf_counter()
            begin()
            time.sleep(max(0.0, spans[0] + seconds - time.perf_counter()))
            spans[1] = time.perf_counter()
            end()
            back = time.perf_counter()
            while time.perf_counter() < back + PATIENCE and not _is_back(calls, spans[1]):
                time.sleep(0.01)
            stop.set()

        disturber = threading.Thread(target=disturb)
        crowd = _tasks if workers == "tasks" else _threads
        crowd(server.url if policy else None, policy, CROWD[workers], calls, stop, disturber)
    return _found(calls, *spans)


def _is_back(calls: Calls, since: float) -> bool:
    return (
        any(calls.is_counted[-i] for i in range(1, min(100, len(calls.ended)) + 1))
        and calls.began[-1] > since
    )


def _found(calls: Calls, since: float, until: float) -> Found:
    took = [
        ended - began
        for began, ended in zip(calls.began, calls.ended, strict=True)
        if ended > since and began < until
    ]
    counted = [
        ended
        for began, ended, is_counted in zip(calls.began, calls.ended, calls.is_counted, strict=True)
        if is_counted and began > until
    ]
    return Found(
        len(took),
        max(took) * 1000,
        statistics.quantiles(took, n=100)[98] * 1000,
        min(counted) - until if counted else float("nan"),
    )


def _options(url: str | None, policy: Any) -> dict[str, Any]:
    if url is None:
        return {}
    return {"name": "outage", "store": url, "on_store_error": policy, "deadline": DEADLINE}


def _tasks(
    url: str | None, policy: Any, crowd: int, calls: Calls, stop: threading.Event, disturber: threading.Thread
) -> None:
    async def work(limiter: AsyncLimiter, key: str) -> None:
        while not stop.is_set():
            began = time.perf_counter()
            try:
                decision = await limiter.hit(key)
            except StoreError:
                calls.add(began, False)
            else:
                calls.add(began, not decision.degraded)
            await asyncio.sleep(PAUSE)

    async def race() -> None:
        async with AsyncLimiter("1000000/hour", **_options(url, policy)) as limiter:
            await limiter.hit("first")
            disturber.start()
            await asyncio.gather(*(work(limiter, f"user:{i}") for i in range(crowd)))

    asyncio.run(race())
    disturber.join()


def _threads(
    url: str | None, policy: Any, crowd: int, calls: Calls, stop: threading.Event, disturber: threading.Thread
) -> None:
    def work(hit: Callable[[str], Any], key: str) -> None:
        while not stop.is_set():
            began = time.perf_counter()
            try:
                decision = hit(key)
            except StoreError:
                calls.add(began, False)
            else:
                calls.add(began, not decision.degraded)
            time.sleep(PAUSE)

    with Limiter("1000000/hour", **_options(url, policy)) as limiter:
        limiter.hit("first")
        workers = [threading.Thread(target=work, args=(limiter.hit, f"user:{i}")) for i in range(crowd)]
        disturber.start()
        for worker in workers:
            worker.start()
        for worker in [*workers, disturber]:
            worker.join()


STEPS = len(CROWD) * (2 * len(POLICIES) + 1)


def main() -> None:
    """Measure, print a table and targets, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a rough look: shorter outages")
    quick = parser.parse_args().quick
    logging.getLogger("headgate").setLevel(logging.CRITICAL)  # outages are what this is about
    progress = Progress(STEPS)
    [section] = run(QUICK if quick else FULL, progress)
    progress.end()
    print(*section.tables, sep="\n", flush=True)
    targets: list[Target] = section.targets
    print(target_table(targets, "Targets (the worst case counts)"))
    write_json("outage-quick" if quick else "outage", {**section.data, "targets": targets})


if __name__ == "__main__":
    main()
