"""What the petition service's limit costs: the latency of a check beside a bare `SELECT 1` on the same connection.

The table has a million counters of 100,000 submitters, ten minutes each, all within the window. Both statements take
turns, each with a round trip of its own, so a busy machine disturbs both alike: what a check adds is the difference of the
same percentile. The document allows 10 ms.

    python -m benchmarks.petitions            20,000 of each
    python -m benchmarks.petitions --quick    2,000 of each, on a tenth of the table
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from uuid import UUID

import psycopg

from headgate.testing.postgres_server import PostgresServer
from headgate_services.petitions.application.services import RateLimitService
from headgate_services.petitions.infrastructure.adapters.persistence import (
    Database,
    PostgresRateLimitStore,
    migrate,
)

ALLOWED_MS = 10.0

_FILL = """
    INSERT INTO petition_rate_limit_buckets (submitter_id, bucket_minute)
    SELECT md5(submitter::text)::uuid, date_trunc('minute', now()) - make_interval(mins => 2 * minute)
    FROM generate_series(1, %s) AS submitter, generate_series(0, 9) AS minute
"""
_SUBMITTERS = "SELECT DISTINCT submitter_id FROM petition_rate_limit_buckets"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a rough look")
    quick = parser.parse_args().quick
    with PostgresServer() as server:
        asyncio.run(_measure(server.url, 10_000 if quick else 100_000, 2_000 if quick else 20_000))


async def _measure(url: str, submitters: int, calls: int) -> None:
    # One connection: what waits for nobody is the database and the wire alone.
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
        for number in range(calls + 100):
            submitter = random.choice(known)
            for name, call in subjects.items():
                started = time.perf_counter()
                await call(submitter)
                if number >= 100:  # the first ones prepare statements and warm caches
                    samples[name].append((time.perf_counter() - started) * 1000)
    finally:
        await database.aclose()
    _print(samples, submitters)


def _fill(url: str, submitters: int) -> list[UUID]:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET statement_timeout = 0")
        connection.execute(_FILL, [submitters])
        connection.execute("VACUUM ANALYZE petition_rate_limit_buckets")
        return [submitter for (submitter,) in connection.execute(_SUBMITTERS)]


async def _select_one(database: Database) -> None:
    async with database.connection() as connection:
        await connection.execute("SELECT 1")


def _print(samples: dict[str, list[float]], submitters: int) -> None:
    print(
        f"{submitters * 10:,} counters of {submitters:,} submitters, {len(samples['check']):,} calls of each, ms"
    )
    print(f"{'':10}{'p50':>8}{'p99':>8}{'worst':>8}")
    for name, times in samples.items():
        times.sort()
        print(f"{name:10}{_at(times, 0.5):8.3f}{_at(times, 0.99):8.3f}{times[-1]:8.3f}")
    half, most = (_at(samples["check"], share) - _at(samples["SELECT 1"], share) for share in (0.5, 0.99))
    verdict = "reached" if most < ALLOWED_MS else "MISSED"
    print(f"a check adds {half:.3f} ms at p50, {most:.3f} ms at p99; allowed are {ALLOWED_MS:g}: {verdict}")


def _at(times: list[float], share: float) -> float:
    return times[min(len(times) - 1, int(len(times) * share))]


if __name__ == "__main__":
    main()
