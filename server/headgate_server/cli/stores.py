"""`migrate` creates Headgate's tables in PostgreSQL; `bench` measures the decisions per second of stores.

The benchmark calls every store from the same number of tasks, with a unique limiter name and keys that are reset at the end.
Other counts are not changed. If a run is killed, its counts expire after a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from headgate import HeadgateError, StoreError, sliding_window
from headgate.observe import redact
from headgate.stores import AsyncGate, Request, check_url, open_async_store
from headgate_server.cli.common import Commands, from_to, optional, read_policy

LONGEST = 600.0
"""The most seconds for `--seconds`."""

_RULE = "1000000000000/minute"  # refuses nothing, and left-over counts expire soon
_KEYS = 100
_CALLS_IN_A_ROW = 1_000
"""Calls of a task before it yields to other tasks; a memory store never waits."""


def add(commands: Commands) -> None:
    """Add the commands for stores."""
    migrate = commands.add(
        "migrate",
        "create or update Headgate's tables in PostgreSQL",
        _migrate,
        about="Each migration is applied once, even if several processes run this command at the same time. Services with "
        "older code can keep running.",
        examples=["headgate migrate postgresql://user@localhost/limits"],
    )
    migrate.add_argument("url", metavar="URL", help="the database: postgresql://user@host/name")

    bench = commands.add(
        "bench",
        "measure the decisions per second of stores from this machine",
        _bench,
        about="Measures memory, an SQLite file and the given stores. Other counts in these stores are not changed. To "
        "compare Headgate with other limiters, run `make bench` in its source code.",
        examples=[
            "headgate bench",
            "headgate bench --store redis://localhost:6379/0 --tasks 200",
            "headgate bench --config headgate.toml --seconds 10",
        ],
    )
    bench.add_argument(
        "--store",
        metavar="URL",
        action="append",
        default=[],
        help="also measure this store; may be given several times",
    )
    bench.add_argument("--config", metavar="FILE", help="also measure the stores of this policy file")
    bench.add_argument(
        "--seconds", metavar="N", type=_seconds, default=2.0, help="seconds per store (default: %(default)g)"
    )
    bench.add_argument(
        "--tasks",
        metavar="N",
        type=from_to(1, 10_000),
        default=32,
        help="number of concurrent tasks (default: %(default)s)",
    )


def _migrate(options: argparse.Namespace) -> None:
    check_url(options.url)
    postgres = optional("headgate.stores.postgres", "PostgreSQL", "headgate[postgres]")
    for line in postgres.migrate(options.url) or ["nothing to do"]:
        print(line)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= LONGEST:  # also false for NaN
        raise argparse.ArgumentTypeError(f"use seconds above 0 and up to {LONGEST:g}, not {text}")
    return seconds


class Measured(NamedTuple):
    """Decisions of a store, their total seconds, and the nanoseconds of each, shortest first."""

    decisions: int
    seconds: float
    latencies: list[int]

    def percentile(self, percent: int) -> float:
        """Return the microseconds that `percent` per cent of the decisions took at most."""
        return self.latencies[(len(self.latencies) - 1) * percent // 100] / 1_000


def _bench(options: argparse.Namespace) -> int:
    failed = False
    print(
        f"{options.tasks} concurrent tasks, one rule, {options.seconds:g} s per store",
        file=sys.stderr,
    )
    with _stores(options) as stores:
        width = max(len(name) for name, _ in stores)
        for name, url in stores:
            try:
                measured = asyncio.run(_measure_store(name, url, options))
            except HeadgateError as error:
                failed = True
                print(f"{name:<{width}}  {redact(str(error))}")
            else:
                print(f"{name:<{width}}  {_line(measured)}", flush=True)
    return 1 if failed else 0


async def _measure_store(name: str, url: str, options: argparse.Namespace) -> Measured:
    print(f"measuring {name}", file=sys.stderr)
    return await measure(url, options.seconds, options.tasks)


def _line(measured: Measured) -> str:
    rate = measured.decisions / measured.seconds
    p50, p99 = measured.percentile(50), measured.percentile(99)
    return f"{rate:>10,.0f} decisions/s   p50 {p50:>9,.1f} µs   p99 {p99:>9,.1f} µs"


@contextmanager
def _stores(options: argparse.Namespace) -> Iterator[list[tuple[str, str]]]:
    """Give name and URL of every store to measure."""
    policy = read_policy(options.config) if options.config is not None else None
    named = [limiter.store for limiter in policy.limiters.values()] if policy is not None else []
    remote = [url for url in (*options.store, *named) if not url.lower().startswith("memory:")]
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder:
        file = f"sqlite:///{Path(folder, 'bench.db')}"
        yield [
            ("memory", "memory://"),
            ("sqlite", file),
            *((redact(url), url) for url in dict.fromkeys(remote)),
        ]


async def measure(url: str, seconds: float, tasks: int) -> Measured:
    """Make decisions in a store from concurrent tasks for `seconds`, and clean up.

    Raises:
        HeadgateError: The store failed.
    """
    name = f"headgate-bench-{secrets.token_hex(8)}"
    keys = [f"key-{number}" for number in range(min(tasks, _KEYS))]
    store = open_async_store(url)
    try:
        # Not a limiter, which would hide an outage.
        gate = store.bind_async(name, (sliding_window(_RULE),))
        await gate.decide(Request("peek", keys[0]))  # connects and registers scripts before the measurement
        latencies: array[int] = array("Q")
        start = time.perf_counter_ns()
        end = start + round(seconds * 1e9)
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(tasks):
                    group.create_task(_decide(gate, keys[number % len(keys)], end, latencies))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            passed = time.perf_counter_ns() - start
            for key in keys:
                with suppress(StoreError):  # then it expires
                    await gate.reset(key)
    finally:
        await store.aclose()
    return Measured(len(latencies), passed / 1e9, sorted(latencies))


async def _decide(gate: AsyncGate, key: str, end: int, latencies: array[int]) -> None:
    now = time.perf_counter_ns
    while True:
        before = now()
        for _ in range(_CALLS_IN_A_ROW):
            await gate.decide(Request("hit", key))
            after = now()
            latencies.append(after - before)
            if after >= end:
                return
            before = after
        await asyncio.sleep(0)
