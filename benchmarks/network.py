"""Decisions per second on a server over loopback, of one caller, of many threads and of many tasks in one process.

Rates are measured in wall-clock time; the tables also contain the CPU time of this process per decision.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from benchmarks.harness import (
    HEADGATE,
    Result,
    Section,
    Target,
    announce,
    each,
    interleave,
    notes,
    number,
    table,
)

KINDS = ("fixed_window", "sliding_window", "sliding_log", "token_bucket")
THREE_RULES = "three rules"
OURS = {kind: f"{HEADGATE}: {kind}" for kind in (*KINDS, THREE_RULES)}
LIMIT = 1_000_000_000


class Caller(NamedTuple):
    """A contender with a connection to the server."""

    hit: Callable[[str], Any]
    """Takes a key; returns an awaitable for tasks."""
    close: Callable[[], Any] = lambda: None


class Measured(NamedTuple):
    """The rates of all contenders, and the table of them."""

    rates: dict[str, Result]
    section: Section

    def require(self, name: str, bound: float, floor: str) -> None:
        """Add a target: the rate of Headgate's slowest single rule divided by the rate of another contender."""
        ratios = {kind: self.rates[OURS[kind]].times(self.rates[floor]) for kind in KINDS}
        slowest = min(ratios, key=lambda kind: ratios[kind])
        target = Target(f"{name} ÷ {floor}", bound, ratios[slowest], at_most=False, where=slowest)
        self.section.targets.append(target)

    def best(self, *prefixes: str) -> str:
        """Return the fastest contender whose name begins with one of the prefixes."""
        names = [name for name in self.rates if name.startswith(prefixes)]
        return max(names, key=lambda name: self.rates[name].median if self.rates[name].samples else 0)


def rules(kind: str) -> list[Any]:
    """Return rules that never refuse during the measurement."""
    import headgate as package

    made = {
        "fixed_window": package.fixed_window(f"{LIMIT}/hour"),
        "sliding_window": package.sliding_window(f"{LIMIT}/minute"),
        "sliding_log": package.sliding_log("1000/second"),
        "token_bucket": package.token_bucket("1000/hour", burst=1_000_000),
    }
    if kind != THREE_RULES:
        return [made[kind]]
    return [made["fixed_window"], made["sliding_window"], made["token_bucket"]]


def headgate(kind: str, store: Any) -> Caller:
    """Build Headgate on a store."""
    from headgate import Limiter

    limiter = Limiter(*rules(kind), name=f"bench {kind}", store=store, on_store_error="raise")
    return Caller(limiter.hit, limiter.store.close)


async def headgate_async(kind: str, store: Any) -> Caller:
    """Build Headgate for tasks on a store."""
    from headgate import AsyncLimiter

    limiter = AsyncLimiter(*rules(kind), name=f"bench {kind}", store=store, on_store_error="raise")
    return Caller(limiter.hit, limiter.store.aclose)


def measure_one(
    title: str, builds: Mapping[str, Callable[[], Caller]], keys: int, calls: int, rounds: int
) -> Measured:
    """Measure one synchronous caller."""

    def work(caller: Caller) -> int:
        hit, some = caller.hit, _cycled(keys)
        for _ in range(calls):
            hit(next(some))
        return calls

    return _measure(title, builds, lambda build: build(), work, lambda caller: caller.close(), rounds)


def measure_threads(
    title: str, builds: Mapping[str, Callable[[], Caller]], threads: int, keys: int, calls: int, rounds: int
) -> Measured:
    """Measure many threads."""
    share = max(1, calls // threads)

    def work(caller: Caller) -> int:
        hit = caller.hit

        def call() -> None:
            some = _cycled(keys)
            for _ in range(share):
                hit(next(some))

        workers = [threading.Thread(target=call) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return share * threads

    return _measure(title, builds, lambda build: build(), work, lambda caller: caller.close(), rounds)


def measure_tasks(
    title: str,
    builds: Mapping[str, Callable[[], Awaitable[Caller]]],
    tasks: int,
    keys: int,
    calls: int,
    rounds: int,
) -> Measured:
    """Measure many tasks of one event loop."""
    share = max(1, calls // tasks)

    async def hit_all(caller: Caller) -> int:
        hit, some = caller.hit, _cycled(keys)

        async def call() -> None:
            for _ in range(share):
                await hit(next(some))

        await asyncio.gather(*(call() for _ in range(tasks)))
        return share * tasks

    async def build_in_loop(build: Callable[[], Awaitable[Caller]]) -> Caller:
        return await build()

    async def close_in_loop(caller: Caller) -> None:
        closing = caller.close()
        if isinstance(closing, Awaitable):
            await closing

    with asyncio.Runner() as loop:
        return _measure(
            title,
            builds,
            lambda build: loop.run(build_in_loop(build)),
            lambda caller: loop.run(hit_all(caller)),
            lambda caller: loop.run(close_in_loop(caller)),
            rounds,
        )


def _cycled(keys: int) -> Iterator[str]:
    return (f"user:{i % keys}" for i in count())


def _measure(
    title: str,
    builds: Mapping[str, Any],
    build: Callable[[Any], Caller],
    work: Callable[[Caller], int],
    close: Callable[[Caller], object],
    rounds: int,
) -> Measured:
    announce(title)
    callers = each(builds, build)
    each(callers, work)  # opens connections, loads scripts and creates keys
    cpu = {name: Result() for name in callers}

    def sample(name: str, caller: Caller) -> float:
        started, worked = time.perf_counter(), time.process_time()
        made = work(caller)
        cpu[name].samples.append((time.process_time() - worked) / made * 1e6)
        return made / (time.perf_counter() - started)

    rates = interleave(
        {
            name: caller if isinstance(caller, Result) else partial(sample, name, caller)
            for name, caller in callers.items()
        },
        rounds,
    )
    each(callers, close)
    floor = next(iter(rates))
    rows = [
        [name, found.cell, number(found.times(rates[floor]), 2), number(cpu[name].median)]
        for name, found in rates.items()
    ]
    headers = ["", "decisions a second", f"÷ {floor}", "CPU µs"]
    data = {"rates": rates, "CPU microseconds": cpu}
    return Measured(rates, Section(title, [table(title, headers, rows), *notes(rates)], data))
