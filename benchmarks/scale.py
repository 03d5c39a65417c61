"""The CPU time of a decision by the number of keys, processes and tasks, on every store.

    python -m benchmarks.scale [--quick]

All costs are CPU time, of the clients and of the server. Wall-clock times of sixteen processes on two processors are
meaningless; CPU time shows how many processors they need. Before the measurement, half of the units of every key are taken,
so that no state expires during a run; then random keys are hit.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.harness import FULL, Scale, Section, announce, cpu_seconds, main, number, table
from headgate import AsyncLimiter, Limiter, MemoryStore, SQLiteStore, token_bucket
from headgate.stores.postgres import migrate
from headgate.testing.postgres_server import PostgresServer
from headgate.testing.servers import RedisServer

UNITS = 1_000_000
FEW_KEYS = 1_000
TASKS = 64
POWERS = range(3, 7)
PROCESSES = (1, 2, 4, 8, 16)
TASK_COUNTS = (1, 16, 64, 256, 1024)
TIMEOUT = 300.0
"""Timeout of a step in seconds. A step takes a few seconds, but more on a busy machine."""


@dataclass(frozen=True)
class Load:
    """The numbers of keys, processes and tasks per process."""

    keys: int = FEW_KEYS
    processes: int = 1
    tasks: int = TASKS


class Cost(NamedTuple):
    """CPU microseconds of one decision, in the client and in the server."""

    client: float
    server: float = 0.0


@contextlib.contextmanager
def opened(store: str) -> Iterator[tuple[str, int | None]]:
    """Start an empty store within a block; yield its address and the process id of its server."""
    match store:
        case "memory":
            yield "memory://", None
        case "SQLite":
            with tempfile.TemporaryDirectory() as folder:
                yield f"sqlite:///{folder}/limits.db", None
        case "Redis":
            with RedisServer() as redis:
                yield redis.url, redis.pid
        case _:
            with PostgresServer() as postgres:
                migrate(postgres.url)
                yield postgres.url, postgres.pid


STORES = ("memory", "SQLite", "Redis", "PostgreSQL")


def cost_of(store: str, load: Load, scale: Scale) -> Cost:
    """Return the median cost of a decision on a new store."""
    announce(f"{store}: {load.keys:,} keys, {load.processes} processes, {load.tasks} tasks each")
    context = multiprocessing.get_context("spawn")
    step, used = context.Barrier(load.processes + 1), context.Queue()
    decisions = max(500, scale.calls // load.processes)
    costs = []
    with opened(store) as (url, server):
        children = [
            context.Process(
                target=hit_in_process,
                args=(url, load, seed, decisions, scale.rounds, step, used),
                daemon=True,
            )
            for seed in range(load.processes)
        ]
        for child in children:
            child.start()
        for _ in range(scale.rounds):
            step.wait(TIMEOUT)
            before = cpu_seconds(server) if server else 0.0
            in_clients = sum(used.get(timeout=TIMEOUT) for _ in children)
            # Connections are still open, so the server's processes for them still exist.
            in_server = cpu_seconds(server) - before if server else 0.0
            step.wait(TIMEOUT)
            costs.append([spent / load.processes / decisions * 1e6 for spent in (in_clients, in_server)])
        for child in children:
            child.join()
    return Cost(*(statistics.median(each) for each in zip(*costs, strict=True)))


def hit_in_process(
    url: str, load: Load, seed: int, decisions: int, rounds: int, step: Any, used: Any
) -> None:
    """Take half of the units of all keys, then hit random keys, and put the CPU seconds of each round into a queue."""
    chooser = random.Random(seed)
    is_shared = url != "memory://"
    own = range(seed if is_shared else 0, load.keys, load.processes if is_shared else 1)
    chosen = [f"user:{chooser.randrange(load.keys)}" for _ in range(decisions)]
    with caller(url, load.tasks) as hit_all:
        hit_all([f"user:{i}" for i in own], UNITS // 2)
        hit_all(chosen, 1)
        for _ in range(rounds):
            step.wait(TIMEOUT)
            began = time.process_time()
            hit_all(chosen, 1)
            used.put(time.process_time() - began)
            step.wait(TIMEOUT)


@contextlib.contextmanager
def caller(url: str, tasks: int) -> Iterator[Any]:
    """Yield a function that hits keys: from one thread in memory and on SQLite, else from many tasks."""
    rule = token_bucket(f"{UNITS}/day")
    if url.startswith(("memory", "sqlite")):
        store = (
            MemoryStore(max_keys=2 * 10 ** POWERS[-1])
            if url == "memory://"
            else SQLiteStore(url.removeprefix("sqlite:///"), timeout=TIMEOUT)
        )

        def hit_in_turn(keys: Sequence[str], cost: int) -> None:
            for key in keys:
                local.hit(key, cost)

        with Limiter(rule, name="scale", store=store) as local:
            yield hit_in_turn
        return

    async def hit_at_once(keys: Sequence[str], cost: int) -> None:
        todo = iter(keys)

        async def work() -> None:
            for key in todo:
                await remote.hit(key, cost)

        await asyncio.gather(*(work() for _ in range(tasks)))

    with asyncio.Runner() as runner:
        remote = AsyncLimiter(rule, name="scale", store=url, on_store_error="raise", deadline=TIMEOUT)
        yield lambda keys, cost: runner.run(hit_at_once(keys, cost))
        runner.run(remote.aclose())


def run(scale: Scale) -> Iterator[Section]:
    """Measure all stores by keys and by processes, and Redis by tasks."""
    powers = POWERS if scale is FULL else POWERS[:-1]
    loads = {f"10^{power}": Load(keys=10**power) for power in powers}
    yield _section("keys", STORES, loads, scale)
    yield _section("processes", STORES, {str(n): Load(processes=n) for n in PROCESSES}, scale)
    yield _section("tasks", ["Redis"], {str(n): Load(tasks=n) for n in TASK_COUNTS}, scale)


def _section(name: str, stores: Sequence[str], loads: dict[str, Load], scale: Scale) -> Section:
    costs = {store: {size: cost_of(store, load, scale) for size, load in loads.items()} for store in stores}
    rows = [
        [f"{store}, {side}", *(number(getattr(cost, side), 1) for cost in found.values())]
        for store, found in costs.items()
        for side in Cost._fields
        if side == "client" or store not in ("memory", "SQLite")
    ]
    title = f"CPU microseconds of a decision, by the number of {name}"
    return Section(name, [table(title, ["", *loads], rows)], {"cost": costs})


if __name__ == "__main__":
    main("scale", __doc__, run)
