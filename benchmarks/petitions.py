"""The cost of the petition service's limit: the time of a check beside a bare `SELECT 1` on the same connection.

    python -m benchmarks.petitions [--quick]

The table has a million counters: ten minutes for each of 100,000 submitters, all within the window. Both statements
alternate, so that a busy machine affects both equally. The cost of a check is the difference of the 99th percentiles; the
contract of the service allows 10 ms.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from uuid import UUID

import psycopg

from benchmarks.harness import Scale, Section, Target, announce, main, number, table
from headgate.testing.postgres_server import PostgresServer
from headgate_services.petitions.application.services import RateLimitService
from headgate_services.petitions.infrastructure.adapters.persistence import (
    Database,
    PostgresRateLimitStore,
    migrate,
)

ALLOWED_MS = 10.0
WARM_UP = 100
FILL = """
    INSERT INTO petition_rate_limit_buckets (submitter_id, bucket_minute)
    SELECT md5(submitter::text)::uuid, date_trunc('minute', now()) - make_interval(mins => 2 * minute)
    FROM generate_series(1, %s) AS submitter, generate_series(0, 9) AS minute
"""
SUBMITTERS = "SELECT DISTINCT submitter_id FROM petition_rate_limit_buckets"


def run(scale: Scale) -> Iterator[Section]:
    """Measure both statements in turns."""
    announce(f"petitions: {10 * scale.keys:,} counters")
    with PostgresServer() as server:
        samples = asyncio.run(_measure(server.url, scale.keys, 2 * scale.calls))
    rows = [
        [name, *(number(_at(times, share), 3) for share in (0.5, 0.99, 1.0))]
        for name, times in samples.items()
    ]
    added = _at(samples["check"], 0.99) - _at(samples["SELECT 1"], 0.99)
    yield Section(
        "petitions",
        [table(f"{10 * scale.keys:,} counters: milliseconds", ["", "p50", "p99", "longest"], rows)],
        {"added at p99": added},
        [Target("petitions: ms that a check adds at p99", ALLOWED_MS, added, at_most=True)],
    )


async def _measure(url: str, submitters: int, calls: int) -> dict[str, list[float]]:
    database = Database(url, pool_size=1, timeout=60)
    await database.open()
    try:
        await migrate(database)
        known = _fill(url, submitters)
        service = RateLimitService(PostgresRateLimitStore(database), limit_per_hour=100)
        subjects: dict[str, Callable[[UUID], Awaitable[object]]] = {
            "SELECT 1": lambda _: _select_one(database),
            "check": service.check_rate_limit,
        }
        samples: dict[str, list[float]] = {name: [] for name in subjects}
        for i in range(calls + WARM_UP):
            submitter = random.choice(known)
            for name, call in subjects.items():
                started = time.perf_counter()
                await call(submitter)
                if i >= WARM_UP:  # now statements are prepared and caches are warm
                    samples[name].append((time.perf_counter() - started) * 1000)
    finally:
        await database.aclose()
    return {name: sorted(times) for name, times in samples.items()}


def _fill(url: str, submitters: int) -> list[UUID]:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET statement_timeout = 0")
        connection.execute(FILL, [submitters])
        connection.execute("VACUUM ANALYZE petition_rate_limit_buckets")
        return [submitter for (submitter,) in connection.execute(SUBMITTERS)]


async def _select_one(database: Database) -> None:
    async with database.connection() as connection:
        await connection.execute("SELECT 1")


def _at(times: list[float], share: float) -> float:
    return times[min(len(times) - 1, int(len(times) * share))]


if __name__ == "__main__":
    main("petitions", __doc__, run)
