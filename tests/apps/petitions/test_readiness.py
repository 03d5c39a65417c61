"""`/readyz` executes everything that a submission needs, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from urllib.parse import quote

import psycopg
import pytest
from structlog.testing import capture_logs

from headgate.testing import FakeClock
from headgate_services.petitions.application.ports import RateLimitPolicy
from headgate_services.petitions.config import PetitionQueueConfig, PetitionRateLimitConfig
from headgate_services.petitions.infrastructure.adapters.persistence import (
    Database,
    PostgresRateLimitStore,
    PostgresReadiness,
)
from headgate_services.petitions.infrastructure.adapters.persistence.readiness import REHEARSAL_SECONDS
from tests.apps.petitions.conftest import Start
from tests.apps.petitions.support import Service, opened, rows, someone

KEPT = (
    "SELECT count(*) FROM petition_submissions",
    "SELECT count(*) FROM petition_rate_limit_buckets",
    "SELECT count(*) FROM ledger.governance_events",
    "SELECT depth FROM petition_queue",
)


def readiness_of(database: Database, clock: Callable[[], float] = time.monotonic) -> PostgresReadiness:
    counters, policy = PostgresRateLimitStore(database), RateLimitPolicy(10, 60)
    return PostgresReadiness(database, counters, policy, PetitionQueueConfig(), clock)


async def ready(service: Service) -> int:
    return (await service.client.get("/readyz")).status_code


async def test_a_missing_table_makes_the_service_not_ready(start: Start, empty_url: str) -> None:
    tables = (
        *("petition_queue", "petition_submissions", "petition_rate_limit_buckets"),
        *("halt_state", "ledger.governance_events"),
    )
    for table in tables:
        service = await start(url=empty_url)
        rows(empty_url, f"ALTER TABLE {table} RENAME TO elsewhere")
        with capture_logs():
            assert await ready(service) == 503, table
            assert (await service.submit(someone())).status_code == 500, table
        schema, _, name = table.rpartition(".")
        rows(empty_url, f"ALTER TABLE {schema or 'public'}.elsewhere RENAME TO {name}")
        assert await ready(service) == 200, table
        assert (await service.submit(someone())).status_code == 201, table


async def test_a_database_that_may_only_be_read_is_not_ready(own_database: Database) -> None:
    async with opened(
        f"{own_database.url}?options={quote('-c default_transaction_read_only=on')}"
    ) as database:
        await database.ping()
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            await readiness_of(database).check()


async def test_the_check_leaves_nothing_behind(start: Start, empty_url: str) -> None:
    limits = PetitionRateLimitConfig(realm_limit=5, global_limit=5)
    service = await start(url=empty_url, rate_limit=limits)
    assert await ready(service) == 200
    assert [rows(empty_url, query) for query in KEPT] == [[(0,)]] * 4
    assert await service.metric("petition_rate_limit_checks_total") is None
    assert (await service.submit(someone())).status_code == 201


async def test_a_service_that_refuses_is_ready(start: Start, empty_url: str) -> None:
    queue, limits = PetitionQueueConfig(threshold=1, hysteresis=0), PetitionRateLimitConfig(global_limit=1)
    service = await start(url=empty_url, queue=queue, rate_limit=limits)
    assert (await service.submit(someone())).status_code == 201
    await service.container.records.halt("maintenance")
    assert (await service.submit(someone())).status_code == 503
    assert await ready(service) == 200


async def test_frequent_checks_do_not_write_each_time(own_database: Database, empty_url: str) -> None:
    clock = FakeClock()
    readiness = readiness_of(own_database, lambda: clock.now)
    numbers = "SELECT last_value FROM ledger.governance_events_sequence_seq"
    await asyncio.gather(*(readiness.check() for _ in range(20)))
    assert rows(empty_url, numbers) == [(1,)]
    clock.advance(REHEARSAL_SECONDS)
    await readiness.check()
    assert rows(empty_url, numbers) == [(2,)]
