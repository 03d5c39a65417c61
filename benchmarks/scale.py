"""`python -m benchmarks.scale [--quick]`: what a decision costs as keys, processes and shards grow.

All costs are CPU time: of the process that asks, and of the server. The wall clock of a busy machine, or of one with two
processors, says nothing about sixteen processes; CPU time says how many processors they need. A Redis server decides in one
thread, so its CPU time per decision is what one shard can do.

Keys are filled in as the store itself would have left them, half of their units taken; then random ones are hit. On servers
the state of one key is copied within the server, which takes a tenth of the time of asking.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import multiprocessing
import random
import resource
import shutil
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import redis

from benchmarks.harness import Plot, Progress, Section, number, table, write_json, write_plots
from headgate import AsyncLimiter, Limiter, MemoryStore, Rule, SQLiteStore, token_bucket
from headgate.testing.postgres_server import PostgresServer
from headgate.testing.servers import RedisServer, find_free_port

UNITS = 1_000_000
"""Of the limit, a day; half of them are taken when a measurement begins, so that no state expires meanwhile."""

FIRST = "00000000"
TASKS = 64
CROWDS = (1, 16, 64, 256, 1024)
PROCESSES = (1, 2, 4, 8, 16)
BUSY = 0.6
"""The share of a processor that is planned for: the rest is for peaks, and for the loss of a shard."""

PAGE_IMAGE = Path(__file__).parent.parent / "docs" / "images" / "scale.svg"

PATIENCE = 300.0
"""Seconds for what takes a few, on a busy machine."""

SLOTS = 16384
HIGHEST_PORT = 55_000
"""Nodes of a cluster also use the port 10000 above theirs."""

RATES = (10**5, 10**6, 10**7)


@dataclass(frozen=True)
class Amount:
    """How much work a run does: rounds, decisions in each sample, and the largest power of ten of keys by store."""

    rounds: int
    decisions: int
    powers: Mapping[str, int]


FULL = Amount(5, 6000, {"memory": 7, "SQLite": 6, "Redis": 7, "PostgreSQL": 6})
QUICK = Amount(2, 2000, {"memory": 5, "SQLite": 4, "Redis": 5, "PostgreSQL": 4})


@dataclass(frozen=True)
class Cost:
    """CPU microseconds of one decision, in the process that asks and in the server."""

    client: float
    server: float = 0.0

    @property
    def total(self) -> float:
        """Both together."""
        return self.client + self.server


def rule() -> Rule:
    """Return what is measured: a token bucket that takes half a day to be fresh again."""
    return token_bucket(f"{UNITS}/day")


def median(costs: Sequence[Cost]) -> Cost:
    """Return the medians of several samples."""
    return Cost(statistics.median(c.client for c in costs), statistics.median(c.server for c in costs))


def cpu_of(pids: Sequence[int]) -> float:
    """Return the CPU seconds that processes have used."""
    used = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):
            used += int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])
    return used / 1e9


def sampled(work: Callable[[], int], pids: Callable[[], Sequence[int]]) -> Cost:
    """Return the cost of a decision of some work, which says how many it has made."""
    server, client = cpu_of(pids()), time.process_time()
    made = work()
    return Cost((time.process_time() - client) / made * 1e6, (cpu_of(pids()) - server) / made * 1e6)


# --- From a thousand keys to ten million ------------------------------------------------------------------------------


@dataclass
class Subject:
    """A store with keys in it.

    Attributes:
        url: Where it is.
        fill: Puts so many keys into it, in place of those before.
        pids: The processes of its server.
        size: Returns the bytes that it takes.
    """

    url: str
    fill: Callable[[int], None]
    pids: Callable[[], Sequence[int]] = lambda: ()
    size: Callable[[], int] = lambda: 0


def measure_keys(amount: Amount, progress: Progress) -> Section:
    """Measure what a decision costs among 10^3, 10^4, … keys."""
    costs: dict[str, dict[int, Cost]] = {}
    sizes: dict[str, dict[int, float]] = {}
    for name, opened in SUBJECTS.items():
        for power in range(3, amount.powers[name] + 1):
            progress.begin(f"{name}: 10^{power} keys")
            with opened() as subject:
                before = subject.size()
                subject.fill(10**power)
                sizes.setdefault(name, {})[10**power] = (subject.size() - before) / 10**power
                costs.setdefault(name, {})[10**power] = _among_keys(name, subject, 10**power, amount)
    powers = range(3, max(amount.powers.values()) + 1)
    rows = [
        [name, *(number(found[10**p].total, 1) if 10**p in found else "-" for p in powers)]
        for name, found in costs.items()
    ]
    bytes_rows = [
        [name, *(number(found[10**p]) if 10**p in found else "-" for p in powers)]
        for name, found in sizes.items()
    ]
    headers = ["", *(f"10^{p}" for p in powers)]
    return Section(
        "keys",
        tables=[
            table("CPU microseconds of a decision, by the number of keys", headers, rows),
            table("Bytes per key, by the number of keys", headers, bytes_rows),
        ],
        data={"cost": costs, "bytes": sizes},
    )


def _among_keys(name: str, subject: Subject, keys: int, amount: Amount) -> Cost:
    chooser = random.Random(keys)
    chosen = [f"user:{chooser.randrange(keys):08d}" for _ in range(amount.decisions)]
    if name in ("memory", "SQLite"):
        with contextlib.closing(limiter_on(subject.url)) as limiter:
            return _in_rounds(lambda: _hit_all(limiter, chosen), subject, amount.rounds)
    with asyncio.Runner() as runner:
        remote = AsyncLimiter(
            rule(), name="scale", store=subject.url, on_store_error="raise", deadline=PATIENCE
        )
        found = _in_rounds(lambda: runner.run(hit_at_once(remote, chosen, TASKS)), subject, amount.rounds)
        runner.run(remote.aclose())
    return found


def _in_rounds(work: Callable[[], int], subject: Subject, rounds: int) -> Cost:
    work()  # connections are open, scripts are there
    return median([sampled(work, subject.pids) for _ in range(rounds)])


def limiter_on(url: str) -> Limiter:
    """Return a limiter; in memory, one that has its keys already."""
    return _in_memory[0] if url == "memory://" else Limiter(rule(), name="scale", store=url)


def _hit_all(limiter: Limiter, keys: Sequence[str]) -> int:
    hit = limiter.hit
    for key in keys:
        hit(key)
    return len(keys)


async def hit_at_once(limiter: AsyncLimiter, keys: Sequence[str], tasks: int) -> int:
    """Hit keys from several tasks, and return how many."""
    todo = iter(keys)

    async def work() -> None:
        for key in todo:
            await limiter.hit(key)

    await asyncio.gather(*(work() for _ in range(tasks)))
    return len(keys)


_in_memory: list[Limiter] = []


@contextlib.contextmanager
def memory_subject() -> Iterator[Subject]:
    """Memory of this process."""
    limiter = Limiter(rule(), name="scale", store=MemoryStore(max_keys=2 * 10**7))
    _in_memory[:] = [limiter]

    def fill(keys: int) -> None:
        for i in range(keys):
            limiter.hit(f"user:{i:08d}", UNITS // 2)

    yield Subject("memory://", fill, size=lambda: _resident())
    _in_memory.clear()


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@contextlib.contextmanager
def sqlite_subject() -> Iterator[Subject]:
    """A file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "limits.db"
        url = f"sqlite:///{path}"

        def fill(keys: int) -> None:
            take_half(url)
            with contextlib.closing(sqlite3.connect(path)) as base:
                ((name, *rest),) = base.execute("SELECT * FROM headgate_states").fetchall()
                row = f"INSERT INTO headgate_states VALUES (?{', ?' * len(rest)})"
                base.executemany(
                    row, ((name.replace(FIRST.encode(), b"%08d" % i), *rest) for i in range(1, keys))
                )
                base.commit()
                base.execute("PRAGMA wal_checkpoint(TRUNCATE)")

        yield Subject(url, fill, size=lambda: path.stat().st_size if path.exists() else 0)


def take_half(url: str) -> None:
    """Take half of the units of the first key."""
    with contextlib.closing(Limiter(rule(), name="scale", store=url)) as limiter:
        limiter.hit(f"user:{FIRST}", UNITS // 2)


COPIES = """
local name = ARGV[3]
for i = tonumber(ARGV[1]), tonumber(ARGV[2]) do
  redis.call('COPY', KEYS[1], name .. string.format('%08d', i) .. ARGV[4])
end
"""
AT_ONCE = 50_000


@contextlib.contextmanager
def redis_subject() -> Iterator[Subject]:
    """A server without a disk."""
    with RedisServer() as server, redis.Redis.from_url(server.url) as client:

        def fill(keys: int) -> None:
            take_half(server.url)
            (name,) = client.keys("*" + FIRST + "*")
            before, _, after = name.partition(FIRST.encode())
            for start in range(1, keys, AT_ONCE):
                client.eval(COPIES, 1, name, start, min(start + AT_ONCE, keys) - 1, before, after)

        def size() -> int:
            about: Any = client.info("memory")
            return int(about["used_memory"])

        yield Subject(server.url, fill, lambda: [server.pid], size)


@contextlib.contextmanager
def postgres_subject() -> Iterator[Subject]:
    """A database."""
    with PostgresServer() as server:
        from headgate.stores.postgres import migrate

        migrate(server.url)

        def ask(query: str, *values: object) -> Any:
            with psycopg.connect(server.url, autocommit=True) as connection:
                found = connection.execute(query, values)
                return found.fetchone() if found.description else None

        def fill(keys: int) -> None:
            take_half(server.url)
            ask(
                "INSERT INTO headgate_states SELECT decode(replace(encode(key, 'hex'), encode(%s, 'hex'), "
                "encode(convert_to(lpad(i::text, 8, '0'), 'utf8'), 'hex')), 'hex'), state, expires "
                "FROM headgate_states, generate_series(1, %s - 1) AS i",
                FIRST.encode(),
                keys,
            )
            ask("VACUUM ANALYZE headgate_states")

        def size() -> int:
            return int(ask("SELECT pg_total_relation_size('headgate_states')")[0])

        yield Subject(server.url, fill, server._processes, size)


SUBJECTS: dict[str, Callable[[], contextlib.AbstractContextManager[Subject]]] = {
    "memory": memory_subject,
    "SQLite": sqlite_subject,
    "Redis": redis_subject,
    "PostgreSQL": postgres_subject,
}


# --- From one process to sixteen --------------------------------------------------------------------------------------


def measure_processes(amount: Amount, progress: Progress) -> Section:
    """Measure what a decision costs while so many processes ask at once."""
    costs: dict[str, dict[int, Cost]] = {}
    for name, opened in SUBJECTS.items():
        for processes in PROCESSES:
            progress.begin(f"{name}: {processes} processes")
            with opened() as subject:
                if name != "memory":
                    subject.fill(1000)
                costs.setdefault(name, {})[processes] = _of_processes(subject, processes, amount)
    rows = [
        [f"{name}{part}", *(number(getattr(found[p], field), 1) for p in PROCESSES)]
        for name, found in costs.items()
        for part, field in ((", asking", "client"), (", server", "server"))
        if any(getattr(cost, field) for cost in found.values())
    ]
    headers = ["", *map(str, PROCESSES)]
    return Section(
        "processes",
        tables=[table("CPU microseconds of a decision, by the number of processes", headers, rows)],
        data={"cost": costs},
    )


def _of_processes(subject: Subject, processes: int, amount: Amount) -> Cost:
    context = multiprocessing.get_context("spawn")
    step, done = context.Barrier(processes + 1), context.Queue()
    each = max(500, 2 * amount.decisions // processes)
    children = [
        context.Process(
            target=ask_in_process, daemon=True, args=(subject.url, seed, each, amount.rounds, step, done)
        )
        for seed in range(processes)
    ]
    for child in children:
        child.start()
    costs = []
    for _ in range(amount.rounds):
        step.wait(PATIENCE)
        before = cpu_of(subject.pids())
        used = [done.get(timeout=PATIENCE) for _ in children]
        after = cpu_of(subject.pids())  # connections are still open, and so are the processes that serve them
        step.wait(PATIENCE)
        costs.append(Cost(sum(used) / processes / each * 1e6, (after - before) / processes / each * 1e6))
    for child in children:
        child.join()
    return median(costs)


def ask_in_process(url: str, seed: int, decisions: int, rounds: int, step: Any, done: Any) -> None:
    """Decide in a process of its own, and put the CPU seconds of each round into a queue."""
    chooser = random.Random(seed)
    keys = [f"user:{chooser.randrange(1000):08d}" for _ in range(decisions)]
    with contextlib.ExitStack() as stack:
        if url.startswith(("memory", "sqlite")):
            store: Any = (
                url if url == "memory://" else SQLiteStore(url.removeprefix("sqlite:///"), timeout=PATIENCE)
            )
            limiter = stack.enter_context(Limiter(rule(), name="scale", store=store))

            def work(some: list[str]) -> int:
                return _hit_all(limiter, some)

        else:
            runner = stack.enter_context(asyncio.Runner())
            remote = AsyncLimiter(rule(), name="scale", store=url, on_store_error="raise", deadline=PATIENCE)
            stack.callback(lambda: runner.run(remote.aclose()))

            def work(some: list[str]) -> int:
                return runner.run(hit_at_once(remote, some, TASKS))

        work(keys[:100])  # connections are open
        for _ in range(rounds):
            step.wait(PATIENCE)
            began = time.process_time()
            work(keys)
            done.put(time.process_time() - began)
            step.wait(PATIENCE)


# --- A connection, a shard, a cluster ---------------------------------------------------------------------------------


def measure_shards(amount: Amount, progress: Progress) -> Section:
    """Measure one connection to Redis by the number of tasks, alone and with three shards."""
    keys = [f"user:{i % 1000:08d}" for i in range(amount.decisions)]
    alone: dict[int, Cost] = {}
    cluster: dict[int, Cost] = {}
    with redis_subject() as subject:
        for tasks in CROWDS:
            progress.begin(f"Redis: {tasks} tasks on one connection")
            alone[tasks] = _of_tasks(subject, keys, tasks, amount.rounds)
    with three_shards() as nodes, contextlib.ExitStack() as stack:
        url = f"redis+cluster://127.0.0.1:{nodes[0].port}"
        subject = Subject(url, lambda _: None, lambda: [node.pid for node in nodes])
        clients = [stack.enter_context(redis.Redis.from_url(node.url)) for node in nodes]
        for tasks in CROWDS:
            progress.begin(f"Redis Cluster: {tasks} tasks on three connections")
            cluster[tasks] = _of_tasks(subject, keys, tasks, amount.rounds)
        sent = _bytes_sent(clients)
        made = asyncio.run(_ask_once(url, keys))
        traffic = (_bytes_sent(clients) - sent) / made
    rows = [
        [f"{name}{part}", *(number(getattr(found[t], field), 1) for t in CROWDS)]
        for name, found in (("one shard", alone), ("three shards", cluster))
        for part, field in ((", asking", "client"), (", Redis", "server"))
    ]
    headers = ["", *map(str, CROWDS)]
    return Section(
        "shards",
        tables=[
            table("CPU microseconds of a decision, by the number of tasks of one process", headers, rows),
            f"\nBytes over the network per decision, both directions: {traffic:.0f}",
        ],
        data={"one shard": alone, "three shards": cluster, "bytes per decision": traffic},
    )


@contextlib.contextmanager
def three_shards() -> Iterator[list[RedisServer]]:
    """A cluster of three nodes."""
    with contextlib.ExitStack() as stack:
        nodes = []
        for i in range(3):
            port = next(port for _ in range(1000) if (port := find_free_port()) < HIGHEST_PORT)
            node = stack.enter_context(RedisServer(options=("--cluster-enabled", "yes"), port=port))
            with redis.Redis.from_url(node.url) as client:
                slots = range(i * SLOTS // 3, (i + 1) * SLOTS // 3)
                client.execute_command("CLUSTER", "ADDSLOTS", *slots)
            nodes.append(node)
            node.command("CLUSTER", "MEET", "127.0.0.1", str(nodes[0].port))
        while not all(_is_well(node) for node in nodes):
            time.sleep(0.05)
        yield nodes


def _is_well(node: RedisServer) -> bool:
    about = node.command("CLUSTER", "INFO")
    return b"cluster_state:ok" in about and b"cluster_known_nodes:3" in about


def _of_tasks(subject: Subject, keys: list[str], tasks: int, rounds: int) -> Cost:
    with asyncio.Runner() as runner:
        limiter = AsyncLimiter(
            rule(), name="scale", store=subject.url, on_store_error="raise", deadline=PATIENCE
        )
        some = keys[: len(keys) // (6 if tasks == 1 else 1)]  # each waits for a round trip
        found = _in_rounds(lambda: runner.run(hit_at_once(limiter, some, tasks)), subject, rounds)
        runner.run(limiter.aclose())
    return found


async def _ask_once(url: str, keys: list[str]) -> int:
    async with AsyncLimiter(
        rule(), name="scale", store=url, on_store_error="raise", deadline=PATIENCE
    ) as limiter:
        return await hit_at_once(limiter, keys, TASKS)


def _bytes_sent(clients: Sequence[redis.Redis]) -> int:
    stats: list[Any] = [client.info("stats") for client in clients]
    return sum(about["total_net_input_bytes"] + about["total_net_output_bytes"] for about in stats)


def plan(alone: Cost, cluster: Cost, traffic: float) -> Section:
    """Say what to run for so many decisions a second, at 60 % of each processor.

    What was measured is multiplied, nothing is extrapolated: cells of three shards, each with processes of its own that ask
    only them. A process that asks many shards has few calls under way to each, and few calls are dear.
    """
    rows = []
    for rate in RATES:
        for name, cost, size in (("clusters of three", cluster, 3), ("single servers", alone, 1)):
            cells = math.ceil(rate * cost.server / 1e6 / BUSY / size)
            processes = math.ceil(rate * cost.client / 1e6 / BUSY)
            rows.append(
                [
                    f"{rate:,}, {name}",
                    f"{cells:,}",
                    f"{cells * size:,}",
                    f"{processes:,}",
                    f"{processes * size:,}",
                    f"{rate * traffic * 8 / 1e9:.1f}",
                ]
            )
    headers = ["decisions a second", "cells", "shards", "processes", "connections", "Gbit/s"]
    return Section("plan", tables=[table("Redis, by CPU time", headers, rows)], data={"rows": rows})


def plots_of(sections: Mapping[str, Section]) -> list[Plot]:
    """Return the curves."""

    def series(costs: Mapping[str, Mapping[int, Cost]]) -> dict[str, list[tuple[float, float]]]:
        return {name: [(x, cost.total) for x, cost in found.items()] for name, found in costs.items()}

    shards = sections["shards"].data
    crowds = {name: shards[name] for name in ("one shard", "three shards")}
    unit = "CPU µs per decision"
    return [
        Plot("By the number of keys", "keys", unit, series(sections["keys"].data["cost"])),
        Plot("By the number of processes", "processes", unit, series(sections["processes"].data["cost"])),
        Plot("Redis, by the tasks of one process", "tasks", unit, series(crowds)),
    ]


def main() -> None:
    """Measure, print tables, write JSON and curves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a rough look: fewer keys, calls and rounds")
    quick = parser.parse_args().quick
    amount = QUICK if quick else FULL
    steps = sum(power - 2 for power in amount.powers.values()) + 4 * len(PROCESSES) + 2 * len(CROWDS)
    if shutil.disk_usage("/dev/shm").free > 2**32:  # so that a disk is not measured
        tempfile.tempdir = "/dev/shm"
    progress = Progress(steps)
    sections: dict[str, Section] = {}
    for measure in (measure_keys, measure_processes, measure_shards):
        section = measure(amount, progress)
        progress.end()
        sections[section.name] = section
        print(*section.tables, sep="\n", flush=True)
    shards = sections["shards"].data
    sections["plan"] = plan(
        shards["one shard"][TASKS], shards["three shards"][TASKS], shards["bytes per decision"]
    )
    print(*sections["plan"].tables, sep="\n")
    name = "scale-quick" if quick else "scale"
    write_json(name, {section.name: section.data for section in sections.values()})
    plots = write_plots(name, "What a decision costs as things grow", plots_of(sections))
    if not quick:
        shutil.copy(plots, PAGE_IMAGE)


if __name__ == "__main__":
    main()
