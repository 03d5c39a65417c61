"""Buckets that no longer count are removed, in small steps, by one instance at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psycopg
import pytest

from headgate import ConfigError, sliding_window
from headgate.stores.postgres import BucketTable

RULE = sliding_window("10/hour")


@pytest.fixture
def table(connection: psycopg.Connection, name: str) -> Iterator[str]:
    connection.execute(
        f"CREATE TABLE {name} (key text, bucket timestamptz, count integer, UNIQUE (key, bucket))".encode()
    )
    yield name
    connection.execute(f"DROP TABLE {name}".encode())


def fill(connection: psycopg.Connection, table: str, ages: list[timedelta], keys: int = 1) -> None:
    """Put buckets of these ages there for some keys."""
    connection.execute(
        f"INSERT INTO {table} SELECT 'key ' || number, now() - age, 1 "
        f"FROM unnest(%s::interval[]) AS age, generate_series(1, %s) AS number".encode(),
        (ages, keys),
    )


def left(connection: psycopg.Connection, table: str) -> int:
    row = connection.execute(f"SELECT count(*) FROM {table}".encode()).fetchone()
    assert row is not None
    count: int = row[0]
    return count


OLD, RECENT = timedelta(hours=3), timedelta(minutes=90)


def test_only_expired_buckets_are_removed(connection: psycopg.Connection, table: str) -> None:
    fill(connection, table, [OLD, RECENT, timedelta(minutes=59), timedelta(0)])
    report = BucketTable(RULE, table=table).cleanup(connection)
    assert (report.deleted, report.ran) == (2, True)
    assert left(connection, table) == 2


def test_older_than_cannot_be_shorter_than_the_rule_needs(connection: psycopg.Connection, table: str) -> None:
    fill(connection, table, [OLD, RECENT])
    buckets = BucketTable(RULE, table=table)
    with pytest.raises(ConfigError, match="at least 1:01:00"):
        buckets.cleanup(connection, older_than=timedelta(hours=1))
    report = buckets.cleanup(connection, older_than=timedelta(hours=2))
    assert report.deleted == 1
    assert left(connection, table) == 1
    row = connection.execute("SELECT clock_timestamp() - interval '2 hours'").fetchone()
    assert row is not None
    assert timedelta(0) <= row[0] - report.cutoff < timedelta(minutes=5)


def test_cleanup_runs_in_batches_and_reports_them(
    connection: psycopg.Connection, table: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headgate")
    fill(connection, table, [OLD], keys=95)
    report = BucketTable(RULE, table=table).cleanup(connection, batch=20)
    assert (report.deleted, report.batches) == (95, 5)
    assert f'cleanup of "{table}": 95 buckets from before' in caplog.text
    assert left(connection, table) == 0


def test_each_batch_is_committed(url: str, connection: psycopg.Connection, table: str) -> None:
    """A cleanup that fails in its third batch keeps the first two."""
    fill(connection, table, [OLD], keys=100)
    connection.execute(
        f"""
        CREATE FUNCTION {table}_fail() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF (SELECT count(*) FROM {table}) < 50 THEN RAISE 'enough'; END IF;
            RETURN NULL;
        END $$;
        CREATE TRIGGER fail AFTER DELETE ON {table} FOR EACH STATEMENT EXECUTE FUNCTION {table}_fail()
        """.encode()
    )
    with psycopg.connect(url) as plain, pytest.raises(psycopg.errors.RaiseException):
        BucketTable(RULE, table=table).cleanup(plain, batch=20)
    assert left(connection, table) == 60


def test_locked_bucket_is_skipped(url: str, connection: psycopg.Connection, table: str) -> None:
    fill(connection, table, [OLD], keys=10)
    with psycopg.connect(url) as other:
        other.execute(f"SELECT FROM {table} WHERE key = 'key 3' FOR UPDATE".encode())
        assert BucketTable(RULE, table=table).cleanup(connection).deleted == 9
    assert BucketTable(RULE, table=table).cleanup(connection).deleted == 1


def test_only_one_cleanup_runs_at_a_time(url: str, connection: psycopg.Connection, table: str) -> None:
    buckets = BucketTable(RULE, table=table)
    fill(connection, table, [OLD], keys=30)
    with psycopg.connect(url) as other:
        other.execute("SELECT 1")  # so the transaction belongs to the caller, and stays open
        assert buckets.cleanup(other).deleted == 30
        fill(connection, table, [OLD], keys=5)
        assert buckets.cleanup(connection).ran is False
        other.rollback()
    assert left(connection, table) == 35
    with ThreadPoolExecutor(6) as pool:

        def clean(_: int) -> int:
            with psycopg.connect(url, autocommit=True) as own:
                return buckets.cleanup(own, batch=3).deleted

        assert sum(pool.map(clean, range(6))) + buckets.cleanup(connection).deleted == 35
    assert left(connection, table) == 0


def test_cleanup_uses_an_index_on_the_bucket_column(connection: psycopg.Connection, table: str) -> None:
    fill(connection, table, [timedelta(minutes=number) for number in range(100)], keys=100)
    fill(connection, table, [OLD], keys=20)
    connection.execute(f"CREATE INDEX ON {table} (bucket)".encode())
    connection.execute(f"ANALYZE {table}".encode())
    statement, parameters = next(BucketTable(RULE, table=table)._cleaning(timedelta(hours=2), 10, None))
    plan = psycopg.RawCursor(connection).execute(f"EXPLAIN {statement}".encode(), parameters).fetchall()
    assert any("_bucket_idx" in line for (line,) in plan)
