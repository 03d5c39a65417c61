"""The counters in PostgreSQL, and the table they are in."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from structlog.testing import capture_logs

from headgate_services.petitions.application.ports import RateLimitPolicy
from headgate_services.petitions.application.services import RateLimitCleanupService, RateLimitService
from headgate_services.petitions.infrastructure.adapters.persistence import (
    Database,
    PetitionRecords,
    PostgresRateLimitStore,
    QueueMeasure,
    all_migrations,
    migrate,
)
from tests.apps.petitions.conftest import Start
from tests.apps.petitions.support import TABLE, Calendar, opened, put_bucket, rows, someone

BUCKETS = f"SELECT bucket_minute, count FROM {TABLE} WHERE submitter_id = %s ORDER BY bucket_minute"


@pytest.mark.requirement("A-23", "A-29", "A-34")
async def test_increment_bucket_creates_new(
    store: PostgresRateLimitStore, calendar: Calendar, shared_url: str
) -> None:
    submitter = someone()
    await store.increment_bucket(submitter, calendar.at.replace(second=31))
    assert rows(shared_url, BUCKETS, submitter) == [(calendar.at, 1)]
    assert not rows(
        shared_url, f"SELECT 1 FROM {TABLE} WHERE date_trunc('minute', bucket_minute) <> bucket_minute"
    )


@pytest.mark.requirement("A-34")
async def test_increment_bucket_updates_existing(
    store: PostgresRateLimitStore, calendar: Calendar, shared_url: str
) -> None:
    submitter = someone()
    await asyncio.gather(*(store.increment_bucket(submitter, calendar.at) for _ in range(20)))
    assert rows(shared_url, BUCKETS, submitter) == [(calendar.at, 20)]


@pytest.mark.requirement("A-23", "A-35", "A-79")
async def test_get_submission_count_sums_buckets(
    store: PostgresRateLimitStore, calendar: Calendar, shared_url: str
) -> None:
    submitter, since = someone(), calendar.at - timedelta(hours=1)
    assert await store.get_submission_count(submitter, since) == 0
    for minutes, count in ((0, 2), (10, 3), (20, 1)):
        put_bucket(shared_url, submitter, calendar.at - timedelta(minutes=minutes), count)
    put_bucket(shared_url, someone(), calendar.at, 7)
    assert await store.get_submission_count(submitter, since) == 6


@pytest.mark.requirement("A-35")
async def test_get_submission_count_excludes_expired(
    store: PostgresRateLimitStore, calendar: Calendar, shared_url: str
) -> None:
    submitter, since = someone(), calendar.at - timedelta(hours=1)
    put_bucket(shared_url, submitter, since, 4)  # exactly a window old
    put_bucket(shared_url, submitter, since + timedelta(minutes=1), 2)
    assert await store.get_submission_count(submitter, since) == 2
    assert (await store.get_usage(RateLimitPolicy(10, 60), submitter)).usages[0].count == 2


@pytest.mark.requirement("A-36", "A-41")
async def test_get_oldest_bucket_expiry(database: Database, calendar: Calendar, shared_url: str) -> None:
    submitter, since = someone(), calendar.at - timedelta(minutes=30)
    store = PostgresRateLimitStore(database, window_minutes=30)
    assert await store.get_oldest_bucket_expiry(submitter, since) is None
    for minutes in (40, 20, 10):
        put_bucket(shared_url, submitter, calendar.at - timedelta(minutes=minutes))
    assert await store.get_oldest_bucket_expiry(submitter, since) == calendar.at + timedelta(minutes=10)


async def test_time_is_the_databases_unless_a_test_says_otherwise(
    database: Database, shared_url: str
) -> None:
    submitter = someone()
    await RateLimitService(PostgresRateLimitStore(database)).record_submission(submitter)
    query = f"SELECT now() - bucket_minute BETWEEN '0' AND '2 minutes' FROM {TABLE} WHERE submitter_id = %s"
    assert rows(shared_url, query, submitter) == [(True,)]


@pytest.mark.requirement("A-33", "A-50")
async def test_the_sum_is_read_from_an_index(empty_url: str) -> None:
    async with opened(empty_url) as database:
        await migrate(database)
    with psycopg.connect(empty_url) as connection:
        # The last hour of 500 submitters, because the planner chooses the index by the contents of the table.
        connection.execute(f"""
            INSERT INTO {TABLE} (submitter_id, bucket_minute)
            SELECT submitter, date_trunc('minute', now()) - ago * interval '1 minute'
            FROM (SELECT gen_random_uuid() AS submitter FROM generate_series(1, 500)) AS submitters,
                generate_series(0, 59) AS ago
        """)
        connection.execute(f"ANALYZE {TABLE}")
        query = f"EXPLAIN SELECT sum(count) FROM {TABLE} WHERE submitter_id = %s AND bucket_minute > %s"
        hour_ago = datetime.now(UTC) - timedelta(hours=1)
        plan = "\n".join(line for (line,) in connection.execute(query, [someone(), hour_ago]).fetchall())
    assert "idx_rate_limit_submitter_minute" in plan or "uq_rate_limit_bucket" in plan
    assert "Index Cond" in plan


# --- The migration ---------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A-25", "A-88")
async def test_migrations_can_be_run_again(empty_url: str) -> None:
    assert (16, "create rate limit buckets") in [migration[:2] for migration in all_migrations()]
    async with opened(empty_url) as database:
        assert await migrate(database) == all_migrations()
        assert await migrate(database) == []
    for migration in all_migrations():
        rows(empty_url, migration.text)


async def test_a_queue_table_of_an_older_version_gets_a_finite_time(empty_url: str) -> None:
    """PostgreSQL 15 and 16 cannot subtract the '-infinity' that the table had at first."""
    for migration in all_migrations():
        if migration.number < 19:
            rows(empty_url, migration.text)
    assert rows(empty_url, "SELECT isfinite(counted_at) FROM petition_queue") == [(False,)]
    async with opened(empty_url) as database:
        await migrate(database)
        assert await PetitionRecords(database).measure_queue(5) == QueueMeasure(0, 0.0)
    rows(empty_url, "DELETE FROM petition_queue")
    rows(empty_url, "INSERT INTO petition_queue DEFAULT VALUES")
    assert rows(empty_url, "SELECT isfinite(counted_at) FROM petition_queue") == [(True,)]


@pytest.mark.requirement("A-26", "A-27", "A-28", "A-29", "A-30", "A-31", "A-88")
def test_the_table_has_its_columns(shared_url: str) -> None:
    query = """
        SELECT column_name, data_type, is_nullable, column_default FROM information_schema.columns
        WHERE table_name = %s ORDER BY ordinal_position
    """
    assert rows(shared_url, query, TABLE) == [
        ("id", "uuid", "NO", "gen_random_uuid()"),
        ("submitter_id", "uuid", "NO", None),
        ("bucket_minute", "timestamp with time zone", "NO", None),
        ("count", "integer", "NO", "1"),
        ("created_at", "timestamp with time zone", "NO", "now()"),
    ]
    key = (
        "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = %s::regclass AND contype = 'p'"
    )
    assert rows(shared_url, key, TABLE) == [("PRIMARY KEY (id)",)]


@pytest.mark.requirement("A-32", "A-33", "A-88")
def test_the_table_has_its_constraint_and_indexes(shared_url: str, calendar: Calendar) -> None:
    indexes = dict(rows(shared_url, "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = %s", TABLE))
    assert indexes["idx_rate_limit_submitter_minute"].endswith("(submitter_id, bucket_minute DESC)")
    assert indexes["idx_rate_limit_bucket_cleanup"].endswith("(bucket_minute)")
    assert "UNIQUE" in indexes["uq_rate_limit_bucket"]
    submitter = someone()
    put_bucket(shared_url, submitter, calendar.at)
    with pytest.raises(psycopg.errors.UniqueViolation, match="uq_rate_limit_bucket"):
        put_bucket(shared_url, submitter, calendar.at)


# --- Cleaning up -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A-37", "A-39", "A-42")
@pytest.mark.parametrize(("ttl_hours", "left"), [(2, [90]), (1, [])])
async def test_cleanup_removes_what_is_older_than_the_ttl(
    database: Database, shared_url: str, ttl_hours: int, left: list[int]
) -> None:
    submitter, now = someone(), datetime(2020, 1, 1, 12, 0, tzinfo=UTC)  # long before what other tests count
    for minutes in (180, 90):
        put_bucket(shared_url, submitter, now - timedelta(minutes=minutes))
    service = RateLimitCleanupService(PostgresRateLimitStore(database, now=lambda: now), ttl_hours)
    with capture_logs() as logs:
        done = await service.cleanup()
    assert (done.deleted, done.ran) == (2 - len(left), True)
    assert done.cutoff == now - timedelta(hours=ttl_hours)
    found = [minute for minute, _ in rows(shared_url, BUCKETS, submitter)]
    assert found == [now - timedelta(minutes=minutes) for minutes in left]
    [line] = [line for line in logs if line["event"] == "cleanup_completed"]
    assert (line["deleted_count"], line["ttl_hours"], line["executed_at"]) == (
        2 - len(left),
        ttl_hours,
        now.isoformat(),
    )
    await RateLimitCleanupService(PostgresRateLimitStore(database, now=lambda: now), 1).cleanup()


@pytest.mark.requirement("A-38")
async def test_cleanup_runs_by_itself_and_after_a_failure_again(
    database: Database, shared_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitter, now = someone(), datetime(2020, 2, 1, 12, 0, tzinfo=UTC)
    store = PostgresRateLimitStore(database, now=lambda: now)
    service = RateLimitCleanupService(store)
    rounds = 0

    async def sleep(seconds: float) -> None:
        nonlocal rounds
        rounds += 1
        assert seconds == 1800
        if rounds == 1:
            put_bucket(shared_url, submitter, now - timedelta(hours=3))
            monkeypatch.setattr(store, "_now", lambda: 1 / 0)
        elif rounds == 2:
            monkeypatch.undo()
        else:
            raise asyncio.CancelledError

    with capture_logs() as logs, pytest.raises(asyncio.CancelledError):
        await service.run_every(1800, sleep)
    assert [line["event"] for line in logs] == ["cleanup_completed", "cleanup_failed", "cleanup_completed"]
    assert rows(shared_url, BUCKETS, submitter) == []


@pytest.mark.requirement("A-38")
async def test_the_service_cleans_up_without_a_request(
    start: Start, empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitter = someone()
    service = await start(url=empty_url, real_time=True, cleanup_interval_seconds=0.1)
    clean_up, has_deleted = service.container.cleanup.cleanup, asyncio.Event()

    async def watched() -> object:
        done = await clean_up()
        if done.deleted:
            has_deleted.set()
        return done

    monkeypatch.setattr(service.container.cleanup, "cleanup", watched)
    put_bucket(empty_url, submitter, datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(hours=3))
    await asyncio.wait_for(has_deleted.wait(), 60)
    assert service.count(submitter) == 0
