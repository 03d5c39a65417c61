"""Every statement also runs on the oldest server that the wheel carries; the conformance suite has the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta

import psycopg
import pytest

from headgate import AsyncLimiter, Limiter, fixed_window, sliding_window
from headgate.stores.postgres import BucketTable, PostgresStore
from headgate.stores.postgres.janitor import NEW_STATES_PER_CLEANING
from headgate.testing.postgres_server import OLDEST, PostgresServer


@pytest.fixture(scope="module")
def oldest() -> Iterator[str]:
    with PostgresServer(OLDEST) as server:
        yield server.url


async def test_the_store_counts_and_clears_away(oldest: str) -> None:
    async with PostgresStore(oldest, deadline=60) as store:
        assert store.migrate()
        lasting = Limiter("5/day", "9/week", name="lasting", store=store, on_store_error="raise")
        assert lasting.hit("a")
        brief = AsyncLimiter(fixed_window("1/1ms"), name="brief", store=store, on_store_error="raise")
        await asyncio.gather(*(brief.hit(f"{number}") for number in range(4 * NEW_STATES_PER_CLEANING)))
        with psycopg.connect(oldest, autocommit=True) as connection:
            connection.execute("SELECT headgate_clean_v1('', 1000000)")
            assert connection.execute("SELECT count(*) FROM headgate_states").fetchone() == (2,)
        assert lasting.check("a", 0).remaining == 4


def test_a_bucket_table_counts_and_is_cleaned(oldest: str) -> None:
    rules = (sliding_window("2/hour", scope="user"), sliding_window("3/hour", scope="*"))
    buckets = BucketTable(*rules, table="uploads", plain="user")
    with psycopg.connect(oldest) as connection:
        connection.execute(
            "CREATE TABLE uploads (key text, bucket timestamptz, count integer, UNIQUE (key, bucket))"
        )
        assert buckets.hold(connection, {"user": "ada"}, 2)
        assert not buckets.hold(connection, {"user": "ada"})
        buckets.record(connection, {"user": "bob"}, 2)
        assert buckets.check(connection, {"user": "eve"}).usages[1].count == 4
        later = buckets.check(connection, {"user": "eve"}).at + timedelta(days=1)
        assert buckets.cleanup(connection, now=later).deleted == 3
