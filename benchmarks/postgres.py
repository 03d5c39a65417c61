"""Decisions per second on a PostgreSQL server over loopback.

    python -m benchmarks.postgres [--quick]

The floors are hand-written code without a library: one prepared upsert of a counter per decision, on one connection from one
thread, and over a pool of 32 connections from 64 tasks, with
psycopg and with asyncpg. They have no periods, never refuse, and return a number. Every
contender uses the same 1,000 existing keys, and no call is refused.

One thread is measured without and with waiting for the disk (`durable=True`).

The server is the one from `headgate[embedded]`, configured to wait for the disk, or the one at HEADGATE_TEST_POSTGRES_URL.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import psycopg

from benchmarks.harness import Scale, Section, main
from benchmarks.network import OURS, Caller, headgate, headgate_async, measure_one, measure_tasks
from headgate.stores.postgres import PostgresStore, migrate
from headgate.testing.postgres_server import PostgresServer, new_database

UPSERT = (
    "INSERT INTO floor VALUES ({}, 1) ON CONFLICT (key) DO UPDATE SET count = floor.count + 1 RETURNING count"
)
ONE_CONNECTION = "floor: upsert, psycopg"
POOL, ASYNCPG_POOL = "floor: upsert, psycopg pool", "floor: upsert, asyncpg pool"
CONNECTIONS = 32
KEYS = 1_000
TASKS = 64


def run(scale: Scale) -> Iterator[Section]:
    """Measure one thread without and with waiting for the disk, then tasks."""
    with database_url() as url:
        for durable in (False, True):
            title = f"PostgreSQL, one thread, synchronous_commit = {'on' if durable else 'off'}"
            one: dict[str, Callable[[], Caller]] = {
                ONE_CONNECTION: partial(upsert, url, durable),
                **{
                    name: partial(headgate, kind, PostgresStore(url, durable=durable, deadline=60))
                    for kind, name in OURS.items()
                },
            }
            found = measure_one(title, one, KEYS, max(KEYS, scale.calls // 5), scale.rounds)
            found.require(title, 0.7, ONE_CONNECTION)
            yield found.section
        title = f"PostgreSQL, {TASKS} tasks"
        tasks: dict[str, Callable[[], Awaitable[Caller]]] = {
            POOL: partial(upsert_pool, url),
            ASYNCPG_POOL: partial(upsert_asyncpg_pool, url),
            **{
                name: partial(headgate_async, kind, PostgresStore(url, deadline=60))
                for kind, name in OURS.items()
            },
        }
        found = measure_tasks(title, tasks, TASKS, KEYS, scale.calls, scale.rounds)
        found.require(title, 5.0, found.best("floor"))
        yield found.section


@contextlib.contextmanager
def database_url() -> Iterator[str]:
    """Create an empty database with all tables within a block, and yield its address."""
    with contextlib.ExitStack() as stack:
        given = os.environ.get("HEADGATE_TEST_POSTGRES_URL")
        if given is None:
            settings = {"fsync": "on", "full_page_writes": "on", "shared_buffers": "128MB"}
            given = stack.enter_context(PostgresServer(settings=settings)).url
        url = stack.enter_context(new_database(given))
        migrate(url)
        with psycopg.connect(url) as connection:
            connection.execute(
                "CREATE TABLE floor (key text PRIMARY KEY, count bigint) WITH (fillfactor = 50)"
            )
        yield url


def _committing(url: str, durable: bool) -> str:
    return f"{url}?options=-csynchronous_commit%3D{'on' if durable else 'off'}"


def upsert(url: str, durable: bool) -> Caller:
    """Build the floor of one thread."""
    connection = psycopg.connect(_committing(url, durable), autocommit=True)
    statement = UPSERT.format("%s").encode()
    return Caller(
        lambda key: connection.execute(statement, (key,), prepare=True).fetchone(), connection.close
    )


async def upsert_pool(url: str) -> Caller:
    """Build the floor of many tasks."""
    from psycopg_pool import AsyncConnectionPool

    pool = AsyncConnectionPool(
        _committing(url, durable=False),
        min_size=CONNECTIONS,
        max_size=CONNECTIONS,
        open=False,
        kwargs={"autocommit": True},
    )
    await pool.open(wait=True)
    statement = UPSERT.format("%s").encode()

    async def hit(key: str) -> Any:
        async with pool.connection() as connection:
            return await (await connection.execute(statement, (key,), prepare=True)).fetchone()

    return Caller(hit, pool.close)


async def upsert_asyncpg_pool(url: str) -> Caller:
    """Build the floor of many tasks with asyncpg."""
    import asyncpg

    pool = await asyncpg.create_pool(
        url, min_size=CONNECTIONS, max_size=CONNECTIONS, server_settings={"synchronous_commit": "off"}
    )
    return Caller(partial(pool.fetchval, UPSERT.format("$1")), pool.close)


if __name__ == "__main__":
    main("postgres", __doc__, run)
