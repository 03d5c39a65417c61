"""`python -m benchmarks.postgres [--quick]`: decisions a second on a PostgreSQL server over loopback, by the wall clock.

The floors are what a careful user writes without any library: one prepared upsert of a counter per decision, with psycopg
from one thread and from one task, and over a pool of 32 connections from many; with asyncpg beside it. They keep no time,
refuse nobody and answer with a number. `coalesced window` is one statement for all tasks that wait: it takes the time,
decides by the limit of a fixed window, writes only what is admitted, and locks keys in order; but calls of one key are
admitted or refused as a group. `three coalesced windows` is the same statement with three keys for each call: three rules
are three rows. `coalesced function` decides calls in turn, as ours must: a loop with an upsert for each.
Every contender goes through 1,000 keys, all of which are there before it begins, and nobody is
ever refused. Rounds are interleaved, so that a slow spell of the machine hits all alike.

Then a bucket table: the check on a million rows beside a bare indexed `SELECT` of the same rows, and beside `SELECT 1`, on
one connection.

The server is the one that comes with `headgate[embedded]`, set up to wait for the disk, or the one named by
HEADGATE_TEST_POSTGRES_URL.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import psycopg

from benchmarks.contenders import HEADGATE
from benchmarks.crowd import race
from benchmarks.harness import (
    FULL,
    QUICK,
    Panel,
    Progress,
    Result,
    Runner,
    Scale,
    Section,
    Target,
    each,
    interleave,
    notes,
    number,
    table,
    target_table,
    worst_of,
    write_chart,
    write_json,
)
from headgate.stores.postgres import BucketTable, PostgresStore, migrate
from headgate.testing.postgres_server import PostgresServer, new_database

ONE_UPSERT = "floor: upsert, psycopg"
ONE_UPSERT_ASYNC = "floor: upsert, psycopg, asyncio"
POOLED = ("floor: upsert, asyncpg pool", "floor: upsert, psycopg pool")
POOL = 32
KEYS = 1_000
LIMIT = 1_000_000_000
TASKS = (1, 64)
CROWD = 32
COMMITS = {"off": False, "on": True}
COALESCED = "floor: coalesced window, asyncpg"
THREE_COALESCED = "floor: three coalesced windows, asyncpg"
IN_TURN = "floor: coalesced function, asyncpg"
STEPS = len(COMMITS) + 1 + len(TASKS) + 1

KINDS = ("fixed_window", "sliding_window", "sliding_log", "token_bucket")
UPSERT = (
    "INSERT INTO floor VALUES ({}, 1) ON CONFLICT (key) DO UPDATE SET count = floor.count + 1 RETURNING count"
)
COUNT_MANY = f"""
    INSERT INTO windows
    SELECT key, floor(extract(epoch FROM clock_timestamp()) / 3600), count(*)
    FROM unnest($1::text[]) AS key GROUP BY key ORDER BY key
    ON CONFLICT (key) DO UPDATE SET number = excluded.number,
        count = CASE WHEN windows.number = excluded.number THEN windows.count ELSE 0 END + excluded.count
    WHERE CASE WHEN windows.number = excluded.number THEN windows.count ELSE 0 END + excluded.count <= {LIMIT}
    RETURNING key, {LIMIT} - count
"""
"""Returns what is left of each key that was admitted."""
COUNT_IN_TURN = f"""
    CREATE FUNCTION count_in_turn(keys text[]) RETURNS bigint[] LANGUAGE plpgsql AS $$
    DECLARE
        this_window CONSTANT bigint := floor(extract(epoch FROM clock_timestamp()) / 3600);
        left_of_each bigint[] := array_fill(NULL::bigint, ARRAY[cardinality(keys)]);
        left_of_this bigint;
        asked record;
    BEGIN
        FOR asked IN SELECT key, place FROM unnest(keys) WITH ORDINALITY AS call (key, place) ORDER BY key, place LOOP
            INSERT INTO windows VALUES (asked.key, this_window, 1)
            ON CONFLICT (key) DO UPDATE SET number = excluded.number,
                count = CASE WHEN windows.number = excluded.number THEN windows.count ELSE 0 END + 1
            WHERE windows.number <> excluded.number OR windows.count < {LIMIT}
            RETURNING {LIMIT} - count INTO left_of_this;
            left_of_each[asked.place] := left_of_this;
        END LOOP;
        RETURN left_of_each;
    END $$
"""
"""Returns what is left for each call that was admitted."""


class Caller(NamedTuple):
    """A contender on the server."""

    hit: Callable[[str], Any]
    """Takes a key; for tasks, returns something to await."""
    close: Callable[[], Any] = lambda: None


def run(scale: Scale, progress: Progress) -> Iterator[Section]:
    """Measure one thread at both commit settings, then many, then tasks, then a bucket table."""
    with database_url() as url:
        for commit in COMMITS:
            yield _measure_threads(scale, progress, url, commit)
        yield _measure_crowd(scale, progress, url)
        for tasks in TASKS:
            yield _measure_tasks(scale, progress, url, tasks)
        yield _measure_buckets(scale, progress, url)


@contextlib.contextmanager
def database_url() -> Iterator[str]:
    """Provide an empty database, ready for all, for as long as a block lasts."""
    with contextlib.ExitStack() as stack:
        given = os.environ.get("HEADGATE_TEST_POSTGRES_URL")
        if given is None:
            settings = {"fsync": "on", "full_page_writes": "on", "shared_buffers": "128MB"}
            given = stack.enter_context(PostgresServer(settings=settings)).url
        url = stack.enter_context(new_database(given))
        migrate(url)
        with psycopg.connect(url) as connection:
            connection.execute(
                "CREATE TABLE floor (key text PRIMARY KEY, count bigint) WITH (fillfactor = 50);"
                "CREATE TABLE windows (key text PRIMARY KEY, number bigint, count bigint) WITH (fillfactor = 50);"
                + COUNT_IN_TURN
            )
        yield url


def _keys() -> Iterator[str]:
    return (f"user:{i % KEYS}" for i in count())


def _committing(url: str, commit: str) -> str:
    return f"{url}?options=-csynchronous_commit%3D{commit}"


# --- One thread ------------------------------------------------------------------------------------------------------


def _measure_threads(scale: Scale, progress: Progress, url: str, commit: str) -> Section:
    progress.begin(f"PostgreSQL: one thread, synchronous_commit = {commit}")
    calls = scale.calls // 5
    callers = each(THREADS, lambda build: build(url, commit))
    each(callers, lambda caller: _time(caller, KEYS))  # so that every key is there
    runners: Mapping[str, Runner | Result] = each(callers, lambda caller: partial(_time, caller, calls))
    measured = interleave(runners, scale.rounds, progress)
    for caller in callers.values():
        if isinstance(caller, Caller):
            caller.close()
    floor = measured[ONE_UPSERT]
    rows = [[name, found.cell, number(found.times(floor), 2)] for name, found in measured.items()]
    ratios = {name: measured[name].times(floor) for name in (f"{HEADGATE}: {kind}" for kind in KINDS)}
    slowest = min(ratios, key=lambda name: ratios[name])
    title = f"one thread, synchronous_commit = {commit}"
    return Section(
        f"postgres, {title}",
        tables=[
            table(f"PostgreSQL, {title}: decisions a second", ["", "per second", "÷ floor"], rows),
            *notes([measured]),
        ],
        data=dict(measured),
        targets=[Target(f"PostgreSQL, {title}, one rule ÷ floor", 0.7, ratios[slowest], False, slowest)],
        panels=[_panel(f"PostgreSQL, {title}: decisions a second (more is better)", measured)],
    )


def _time(caller: Caller, calls: int) -> float:
    hit, keys = caller.hit, _keys()
    started = time.perf_counter()
    for _ in range(calls):
        hit(next(keys))
    return calls / (time.perf_counter() - started)


def upsert(url: str, commit: str) -> Caller:
    """Build the floor."""
    connection = psycopg.connect(_committing(url, commit), autocommit=True)
    statement = UPSERT.format("%s").encode()
    return Caller(
        lambda key: connection.execute(statement, (key,), prepare=True).fetchone(), connection.close
    )


def headgate(kind: str, url: str, commit: str) -> Caller:
    """Build ours."""
    from headgate import Limiter

    store = PostgresStore(url, durable=COMMITS[commit], deadline=60)
    limiter = Limiter(*_rules(kind), name=f"bench {kind}", store=store, on_store_error="raise")
    return Caller(limiter.hit, store.close)


def _rules(kind: str) -> list[Any]:
    import headgate as package

    rules = {
        "fixed_window": package.fixed_window(f"{LIMIT}/hour"),
        "sliding_window": package.sliding_window(f"{LIMIT}/minute"),
        "sliding_log": package.sliding_log("1000/minute"),
        "token_bucket": package.token_bucket("1000/hour", burst=1_000_000),
    }
    if kind != "three rules":
        return [rules[kind]]
    return [rules["fixed_window"], rules["sliding_window"], rules["token_bucket"]]


# README, "PostgresBucket": a log, one table per key; so one key it is, with few hits in its window.
def pyrate(url: str, commit: str) -> Caller:
    """Build pyrate-limiter."""
    from psycopg_pool import ConnectionPool
    from pyrate_limiter import Limiter, PostgresBucket, Rate

    pool = ConnectionPool(_committing(url, commit), open=True)
    limiter = Limiter(PostgresBucket(pool, "bench", [Rate(1000, 1000)]))
    return Caller(lambda key: limiter.try_acquire("user:0", blocking=False), pool.close)


THREADS: dict[str, Callable[[str, str], Caller]] = {
    ONE_UPSERT: upsert,
    **{f"{HEADGATE}: {kind}": partial(headgate, kind) for kind in (*KINDS, "three rules")},
    "pyrate-limiter: sliding_log": pyrate,
}


# --- Many threads ----------------------------------------------------------------------------------------------------


def _measure_crowd(scale: Scale, progress: Progress, url: str) -> Section:
    progress.begin(f"PostgreSQL: {CROWD} threads")
    callers = each(CROWD_CALLERS, lambda build: build(url, "off"))
    each(callers, lambda caller: _time(caller, KEYS))  # so that every key is there
    cpu: dict[str, Result] = {name: Result() for name in callers}

    def sample(name: str, caller: Caller) -> float:
        rate, microseconds = race(caller.hit, CROWD, scale.calls, _keys)
        cpu[name].samples.append(microseconds)
        return rate

    runners: dict[str, Runner | Result] = {
        name: caller if isinstance(caller, Result) else partial(sample, name, caller)
        for name, caller in callers.items()
    }
    measured = interleave(runners, scale.rounds, progress)
    for caller in callers.values():
        if isinstance(caller, Caller):
            caller.close()
    pool = measured[POOLED[1]]
    rows = [
        [name, found.cell, number(found.times(pool), 2), number(cpu[name].median)]
        for name, found in measured.items()
    ]
    ratios = {name: measured[name].times(pool) for name in (f"{HEADGATE}: {kind}" for kind in KINDS)}
    title = f"{CROWD} threads, synchronous_commit = off"
    return Section(
        f"postgres, {CROWD} threads",
        tables=[
            table(f"PostgreSQL, {title}: decisions a second", ["", "per second", "÷ pool", "CPU µs"], rows),
            *notes([measured]),
        ],
        data={"rates": measured, "CPU microseconds": cpu},
        targets=[worst_of(f"PostgreSQL, {title}, one rule ÷ pool of {POOL}", 4.0, ratios, at_most=False)],
        panels=[_panel(f"PostgreSQL, {title}: decisions a second (more is better)", measured)],
    )


def upsert_pool(url: str, commit: str) -> Caller:
    """Build the floor of many threads."""
    from psycopg_pool import ConnectionPool

    pool = ConnectionPool(
        _committing(url, commit), min_size=POOL, max_size=POOL, open=True, kwargs={"autocommit": True}
    )
    pool.wait()
    statement = UPSERT.format("%s").encode()

    def hit(key: str) -> Any:
        with pool.connection() as connection:
            return connection.execute(statement, (key,), prepare=True).fetchone()

    return Caller(hit, pool.close)


CROWD_CALLERS: dict[str, Callable[[str, str], Caller]] = {
    POOLED[1]: upsert_pool,
    **{f"{HEADGATE}: {kind}": partial(headgate, kind) for kind in (*KINDS, "three rules")},
}


# --- Tasks -----------------------------------------------------------------------------------------------------------


def _measure_tasks(scale: Scale, progress: Progress, url: str, tasks: int) -> Section:
    progress.begin(f"PostgreSQL: {tasks} task{'s' * (tasks > 1)}")
    calls = scale.calls // (5 if tasks == 1 else 1)
    waits: dict[str, Result] = {name: Result() for name in TASKS_CALLERS}
    with asyncio.Runner() as loop:
        trips = _round_trips(url, loop, tasks, calls)
        callers = each(TASKS_CALLERS, lambda build: loop.run(build(url)))
        each(callers, lambda caller: loop.run(_race(caller, TASKS[-1], KEYS)))  # so that every key is there
        runners: dict[str, Runner | Result] = {
            name: caller
            if isinstance(caller, Result)
            else partial(_sample, loop, caller, tasks, calls, waits[name])
            for name, caller in callers.items()
        }
        measured = interleave(runners, scale.rounds, progress)
        for caller in callers.values():
            if isinstance(caller, Caller):
                loop.run(_closed(caller))
    floor = _floor(tasks, measured)
    rows = [
        [name, found.cell, number(found.times(measured[floor]), 2), number(waits[name].median * 1e6)]
        for name, found in measured.items()
    ]
    return Section(
        f"postgres, {tasks} tasks",
        tables=[
            table(
                f"PostgreSQL, asyncio, {tasks} task{'s' * (tasks > 1)} in one process, synchronous_commit = off: "
                f"decisions a second",
                ["", "per second", "÷ floor", "p50 µs"],
                rows,
            ),
            *notes([measured]),
            f"The floor of the ratios is {floor!r}. Transactions per decision, by the server's count: {trips:.3f}",
            f"Three windows ÷ one, coalesced: {measured[THREE_COALESCED].times(measured[COALESCED]):.2f}",
        ],
        data={"rates": measured, "p50": waits, "transactions per decision": trips},
        targets=_task_targets(tasks, measured, floor, trips),
        panels=[_panel(f"PostgreSQL, asyncio, {tasks} tasks: decisions a second (more is better)", measured)],
    )


def _floor(tasks: int, measured: Mapping[str, Result]) -> str:
    """Return the best that one statement per decision does."""
    candidates = (ONE_UPSERT_ASYNC,) if tasks == 1 else POOLED
    return max(candidates, key=lambda name: measured[name].median if measured[name].samples else 0.0)


def _task_targets(tasks: int, measured: Mapping[str, Result], floor: str, trips: float) -> list[Target]:
    ratios = {
        name: measured[name].times(measured[floor]) for name in (f"{HEADGATE}: {kind}" for kind in KINDS)
    }
    slowest = min(ratios, key=lambda name: ratios[name])
    if tasks == 1:
        return [
            Target("PostgreSQL, 1 task, one rule ÷ psycopg's upsert", 0.7, ratios[slowest], False, slowest),
            Target("PostgreSQL, 1 task, transactions per decision", 1.1, trips, True),
        ]
    coalesced = {
        name: measured[name].times(measured[COALESCED]) for name in (f"{HEADGATE}: {kind}" for kind in KINDS)
    }
    three = measured[f"{HEADGATE}: three rules"].times(measured[f"{HEADGATE}: fixed_window"])
    return [
        Target(f"PostgreSQL, {tasks} tasks, one rule ÷ {floor}", 4.0, ratios[slowest], False, slowest),
        worst_of(f"PostgreSQL, {tasks} tasks, one rule ÷ {COALESCED}", 1.0, coalesced, at_most=False),
        Target(f"PostgreSQL, {tasks} tasks, three rules ÷ one", 0.7, three, False),
        Target(f"PostgreSQL, {tasks} tasks, transactions per decision", 0.1, trips, True),
    ]


def _sample(loop: asyncio.Runner, caller: Caller, tasks: int, calls: int, waits: Result) -> float:
    rate, wait = loop.run(_race(caller, tasks, calls))
    waits.samples.append(wait)
    return rate


async def _race(caller: Caller, tasks: int, calls: int) -> tuple[float, float]:
    """Return decisions a second, and the median of the seconds that each took."""
    took: list[float] = []
    hit, clock, keys = caller.hit, time.perf_counter, _keys()

    async def worker() -> None:
        for _ in range(max(1, calls // tasks)):
            started = clock()
            await hit(next(keys))
            took.append(clock() - started)

    started = clock()
    await asyncio.gather(*(worker() for _ in range(tasks)))
    return len(took) / (clock() - started), statistics.median(took)


OTHER_SESSIONS = """
    SELECT FROM pg_stat_activity
    WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
"""


def _round_trips(url: str, loop: asyncio.Runner, tasks: int, calls: int) -> float:
    """Return how many transactions the server itself counts for a decision; clearing away is among them."""
    before = _transactions(url)
    caller = loop.run(headgate_async("token_bucket", url))
    loop.run(_race(caller, tasks, calls))
    loop.run(_closed(caller))
    return (_transactions(url) - before) / (calls // tasks * tasks)


def _transactions(url: str) -> int:
    with psycopg.connect(url, autocommit=True) as connection:
        # A session is counted when the server has ended it, which may be some time after its client has left.
        until = time.monotonic() + 5
        while connection.execute(OTHER_SESSIONS).fetchone() and time.monotonic() < until:
            time.sleep(0.01)
        row = connection.execute(
            "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
        ).fetchone()
    return int(row[0]) if row else 0


async def _closed(caller: Caller) -> None:
    closing = caller.close()
    if isinstance(closing, Awaitable):
        await closing


async def upsert_psycopg(url: str) -> Caller:
    """Build the floor of one task."""
    connection = await psycopg.AsyncConnection.connect(_committing(url, "off"), autocommit=True)
    statement, lock = UPSERT.format("%s").encode(), asyncio.Lock()

    async def hit(key: str) -> Any:
        async with lock:  # a connection has one statement under way at most
            return await (await connection.execute(statement, (key,), prepare=True)).fetchone()

    return Caller(hit, connection.close)


async def upsert_asyncpg(url: str) -> Caller:
    """Build the same with the other driver."""
    import asyncpg

    connection = await asyncpg.connect(url, server_settings={"synchronous_commit": "off"})
    statement = await connection.prepare(UPSERT.format("$1"))
    lock = asyncio.Lock()

    async def hit(key: str) -> Any:
        async with lock:
            return await statement.fetchval(key)

    return Caller(hit, connection.close)


async def upsert_asyncpg_pool(url: str) -> Caller:
    """Build a floor of many tasks."""
    import asyncpg

    pool = await asyncpg.create_pool(
        url, min_size=POOL, max_size=POOL, server_settings={"synchronous_commit": "off"}
    )
    return Caller(partial(pool.fetchval, UPSERT.format("$1")), pool.close)


async def upsert_psycopg_pool(url: str) -> Caller:
    """Build the other floor of many tasks."""
    from psycopg_pool import AsyncConnectionPool

    pool = AsyncConnectionPool(
        _committing(url, "off"), min_size=POOL, max_size=POOL, open=False, kwargs={"autocommit": True}
    )
    await pool.open(wait=True)
    statement = UPSERT.format("%s").encode()

    async def hit(key: str) -> Any:
        async with pool.connection() as connection:
            return await (await connection.execute(statement, (key,), prepare=True)).fetchone()

    return Caller(hit, pool.close)


async def count_many(rules: int, url: str) -> Caller:
    """Build what batching can bring at best: one statement for all tasks that wait, and no more than that."""
    statement, close = await _prepared(url, COUNT_MANY)
    prefixes = [f"{rule}:" for rule in range(rules)]

    async def ask(keys: list[str]) -> list[int]:
        left = dict(await statement.fetch([prefix + key for key in keys for prefix in prefixes]))
        return [min(left.get(prefix + key, -1) for prefix in prefixes) for key in keys]

    return Caller(_coalesced(ask), close)


async def count_in_turn(url: str) -> Caller:
    """Build the same with a function that decides one call after the other."""
    statement, close = await _prepared(url, "SELECT count_in_turn($1)")
    return Caller(_coalesced(statement.fetchval), close)


async def _prepared(url: str, text: str) -> tuple[Any, Callable[[], Any]]:
    import asyncpg

    connection = await asyncpg.connect(url, server_settings={"synchronous_commit": "off"})
    return await connection.prepare(text), connection.close


def _coalesced(ask: Callable[[list[str]], Awaitable[Any]]) -> Callable[[str], asyncio.Future[Any]]:
    """Return a hit whose calls leave together if they come while others are under way."""
    waiting: list[tuple[str, asyncio.Future[Any]]] = []
    is_busy = False
    tasks: set[asyncio.Task[None]] = set()

    async def send() -> None:
        nonlocal waiting, is_busy
        while waiting:
            batch, waiting = waiting, []
            answers = await ask([key for key, _ in batch])
            for (_, future), answer in zip(batch, answers, strict=True):
                future.set_result(answer)
        is_busy = False

    def hit(key: str) -> asyncio.Future[Any]:
        nonlocal is_busy
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waiting.append((key, future))
        if not is_busy:
            is_busy = True
            task = asyncio.ensure_future(send())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        return future

    return hit


async def headgate_async(kind: str, url: str) -> Caller:
    """Build ours."""
    from headgate import AsyncLimiter

    store = PostgresStore(url, deadline=60)
    limiter = AsyncLimiter(*_rules(kind), name=f"bench {kind}", store=store, on_store_error="raise")
    return Caller(limiter.hit, store.aclose)


TASKS_CALLERS: dict[str, Callable[[str], Any]] = {
    ONE_UPSERT_ASYNC: upsert_psycopg,
    "floor: upsert, asyncpg": upsert_asyncpg,
    POOLED[0]: upsert_asyncpg_pool,
    POOLED[1]: upsert_psycopg_pool,
    COALESCED: partial(count_many, 1),
    THREE_COALESCED: partial(count_many, 3),
    IN_TURN: count_in_turn,
    **{f"{HEADGATE}: {kind}": partial(headgate_async, kind) for kind in (*KINDS, "three rules")},
}


# --- A bucket table --------------------------------------------------------------------------------------------------

FILL = """
    CREATE TABLE buckets (key text, bucket timestamptz, count integer, PRIMARY KEY (key, bucket));
    INSERT INTO buckets
    SELECT 'user:' || number, date_trunc('minute', now()) - minute * interval '1 minute', 1
    FROM generate_series(0, {}) AS number, generate_series(0, 9) AS minute;
    ANALYZE buckets
"""
BARE = "SELECT bucket, count FROM buckets WHERE key = %s AND bucket > now() - interval '61 minutes'"


def _measure_buckets(scale: Scale, progress: Progress, url: str) -> Section:
    progress.begin("PostgreSQL: bucket table")
    users, calls = scale.keys, scale.calls // 10
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(FILL.format(users - 1).encode())
        buckets = BucketTable("1000/hour", table="buckets")
        contenders: dict[str, Callable[[str], object]] = {
            "SELECT 1": lambda key: connection.execute("SELECT 1", prepare=True).fetchone(),
            "bare indexed SELECT": lambda key: connection.execute(BARE, (key,), prepare=True).fetchall(),
            f"{HEADGATE}: check": lambda key: buckets.check(connection, key),
        }
        runners: dict[str, Runner | Result] = {
            name: partial(_time_buckets, call, calls, users) for name, call in contenders.items()
        }
        measured = interleave(runners, scale.rounds, progress)
    bare = measured["bare indexed SELECT"]
    rows = [[name, found.cell, number(found.times(bare), 2)] for name, found in measured.items()]
    ours = measured[f"{HEADGATE}: check"].times(bare)
    return Section(
        "postgres, bucket table",
        tables=[
            table(
                f"Bucket table of {users * 10:,} rows: microseconds", ["", "per check", "÷ bare SELECT"], rows
            )
        ],
        data=dict(measured),
        targets=[Target("Bucket table, check ÷ bare indexed SELECT", 1.5, ours, True)],
    )


def _time_buckets(call: Callable[[str], object], calls: int, users: int) -> float:
    step = users // calls or 1
    started = time.perf_counter()
    for number_of_call in range(calls):
        call(f"user:{number_of_call * step % users}")
    return (time.perf_counter() - started) / calls * 1e6


def _panel(title: str, measured: dict[str, Result]) -> Panel:
    return Panel(title, "/s", [(n, r.median, number(r.median)) for n, r in measured.items() if r.samples])


def main() -> None:
    """Measure, print tables and targets, write JSON and a chart."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a rough look: fewer calls and rounds")
    quick = parser.parse_args().quick
    progress = Progress(STEPS)
    sections = []
    for section in run(QUICK if quick else FULL, progress):
        progress.end()
        print(*section.tables, sep="\n", flush=True)
        sections.append(section)
    targets = [target for section in sections for target in section.targets]
    print(target_table(targets, "Targets (the worst case counts)"))
    name = "postgres-quick" if quick else "postgres"
    write_json(name, {**{section.name: section.data for section in sections}, "targets": targets})
    panels = [panel for section in sections for panel in section.panels]
    write_chart(name, "Headgate on PostgreSQL beside hand-written floors (more is better)", panels, HEADGATE)


if __name__ == "__main__":
    main()
