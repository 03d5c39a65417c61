"""Counters in a table of the user's: exact, inside the user's transactions, and rolled back with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg import IsolationLevel
from psycopg.rows import dict_row

from headgate import ConfigError, CostTooHigh, Limiter, StoreConflict, sliding_window
from headgate.stores.postgres import AsyncBucketTable, BucketDecision, BucketTable
from headgate.stores.postgres import bucket_table as module
from headgate.testing import FakeClock
from tests.searching import EXAMPLES

TEN = datetime(2026, 3, 5, 10, tzinfo=UTC)


def at(minutes: float) -> datetime:
    """Return a time in minutes after ten o'clock."""
    return TEN + timedelta(minutes=minutes)


def make_table(connection: psycopg.Connection, name: str, key_type: str = "text") -> None:
    connection.execute(
        f"""
        CREATE TABLE {name} (
            id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
            key {key_type} NOT NULL,
            bucket timestamptz NOT NULL,
            count integer NOT NULL DEFAULT 1 CHECK (count > 0),
            UNIQUE (key, bucket)
        )
        """.encode()
    )


@pytest.fixture
def table(connection: psycopg.Connection, name: str) -> Iterator[str]:
    """A table of text keys."""
    make_table(connection, name)
    yield name
    connection.execute(f"DROP TABLE {name}".encode())


@pytest.fixture
def uuids(connection: psycopg.Connection, name: str) -> Iterator[str]:
    """A table of UUIDs."""
    make_table(connection, f"{name}_uuid", "uuid")
    yield f"{name}_uuid"
    connection.execute(f"DROP TABLE {name}_uuid".encode())


def rows(connection: psycopg.Connection, table: str) -> list[tuple[Any, ...]]:
    return connection.execute(f"SELECT key, bucket, count FROM {table} ORDER BY 1, 2".encode()).fetchall()


def hold(connection: psycopg.Connection, buckets: BucketTable, *args: Any, **options: Any) -> BucketDecision:
    """Hold in a separate transaction."""
    with connection.transaction():
        return buckets.hold(connection, *args, **options)


# --- Counting ---------------------------------------------------------------------------------------------------------


def test_refusal_counts_nothing_and_returns_next_allowed(connection: psycopg.Connection, table: str) -> None:
    buckets = BucketTable("10/hour", table=table)
    hold(connection, buckets, "a", 4, now=at(0))
    hold(connection, buckets, "a", 6, now=at(20))
    refused = hold(connection, buckets, "a", 2, now=at(30))
    assert not refused
    assert refused.at == at(30)
    # Strict: a bucket counts until its last instant is an hour old.
    assert refused.next_allowed == at(61)
    assert (refused.binding.count, refused.binding.limit, refused.binding.remaining) == (10, 10, 0)
    assert (refused.binding.oldest_expiry, refused.binding.newest_expiry) == (at(61), at(81))
    assert refused.decision.retry_after == 31 * 60
    assert len(rows(connection, table)) == 2
    just_before = refused.next_allowed - timedelta(microseconds=1)
    assert not buckets.check(connection, "a", 2, now=just_before)
    assert buckets.check(connection, "a", 2, now=refused.next_allowed)


def test_default_time_is_the_database_clock(connection: psycopg.Connection, table: str) -> None:
    buckets = BucketTable("10/hour", table=table)
    before = connection.execute("SELECT clock_timestamp()").fetchone()
    decision = hold(connection, buckets, "a")
    after = connection.execute("SELECT clock_timestamp()").fetchone()
    assert before is not None
    assert after is not None
    assert before[0] <= decision.at <= after[0]
    [(_, bucket, count)] = rows(connection, table)
    assert (bucket, count) == (decision.at.replace(second=0, microsecond=0), 1)
    empty = buckets.check(connection, "b")
    assert (empty.binding.count, empty.binding.oldest_expiry, empty.next_allowed) == (0, None, empty.at)


def test_a_cost_of_0_is_admitted_and_one_above_the_limit_is_an_error(
    connection: psycopg.Connection, table: str
) -> None:
    buckets = BucketTable("2/hour", table=table)
    assert hold(connection, buckets, "a", 0)
    with connection.transaction():
        buckets.record(connection, "a", 0)
    assert rows(connection, table) == []
    with pytest.raises(CostTooHigh), connection.transaction():
        buckets.hold(connection, "a", 3)
    with pytest.raises(ConfigError), connection.transaction():
        buckets.record(connection, "a", -1)


@pytest.mark.parametrize(
    ("key_type", "keys"),
    [
        ("uuid", [UUID(int=1), UUID(int=2)]),
        ("bigint", [-(2**63), 2**63 - 1]),
        ("text", ["", 'it\'s "quoted" \\ $1 %s 💧']),
    ],
)
def test_keys_of_every_type_are_counted_apart(
    connection: psycopg.Connection, name: str, key_type: Any, keys: list[Any]
) -> None:
    make_table(connection, name, key_type)
    buckets = BucketTable("1/hour", table=name, key_type=key_type)
    for key in keys:
        assert hold(connection, buckets, key)
        assert not hold(connection, buckets, key)
    assert {row[0] for row in rows(connection, name)} == set(keys)


def test_names_are_quoted(connection: psycopg.Connection) -> None:
    """Without quotes, these names would be SQL injections."""
    schema, table, key, bucket, count = (
        f'{word}"; DROP TABLE "x\'{{}}%s$1' for word in ("s", "t", "k", "b", "c")
    )
    quoted = {word: '"{}"'.format(word.replace('"', '""')) for word in (schema, table, key, bucket, count)}
    connection.execute(f"CREATE SCHEMA {quoted[schema]}".encode())
    connection.execute(
        f"CREATE TABLE {quoted[schema]}.{quoted[table]} ({quoted[key]} text, {quoted[bucket]} timestamptz, "
        f"{quoted[count]} bigint, PRIMARY KEY ({quoted[key]}, {quoted[bucket]}))".encode()
    )
    buckets = BucketTable("1/hour", table=(schema, table), key=key, bucket=bucket, count=count)
    assert hold(connection, buckets, "a", now=at(0))
    assert not hold(connection, buckets, "a", now=at(0))
    with connection.transaction():
        buckets.record(connection, "a", now=at(0))
    assert buckets.cleanup(connection, now=at(600)).deleted == 1
    connection.execute(f"DROP SCHEMA {quoted[schema]} CASCADE".encode())


@pytest.mark.parametrize(
    "table", ["time", "usage", "live", "old", "asked", "counted", "numbers", "locked", "order"]
)
def test_table_name_may_contain_any_characters(url: str, table: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(
            f'CREATE TEMPORARY TABLE "{table}" ("at" text, units timestamptz, kept int, UNIQUE ("at", units))'.encode()
        )
        rules = (sliding_window("1/hour", scope="user"), sliding_window("2/hour", scope="*"))
        buckets = BucketTable(*rules, table=table, key="at", bucket="units", count="kept", plain="user")
        assert buckets.hold(connection, {"user": "ada"}, now=at(0))
        assert not buckets.hold(connection, {"user": "ada"}, now=at(0))
        buckets.record(connection, {"user": "ada"}, now=at(0))
        assert [usage.count for usage in buckets.check(connection, {"user": "ada"}, now=at(0)).usages] == [
            2,
            2,
        ]
        assert buckets.cleanup(connection, now=at(600)).deleted == 2


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Kathmandu"])
def test_daylight_saving_and_time_zones_change_nothing(
    connection: psycopg.Connection, table: str, zone: str
) -> None:
    """In New York, 2026-03-08 has 23 hours."""
    connection.execute(f"SET timezone = '{zone}'".encode())
    buckets = BucketTable(sliding_window("10/day", buckets=24), table=table)
    start = datetime(2026, 3, 8, 3, 30, tzinfo=UTC)
    hold(connection, buckets, "a", 10, now=start)
    refused = buckets.check(connection, "a", now=start + timedelta(hours=20))
    assert refused.next_allowed == datetime(2026, 3, 9, 4, tzinfo=UTC)
    assert rows(connection, table)[0][1] == datetime(2026, 3, 8, 3, tzinfo=UTC)


# --- Same decisions as other stores -------------------------------------------------------------------------------------

steps = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 59_999_999, 60_000_000, 600_000_000, 3_540_000_000, 3_600_000_000]),
        st.sampled_from(["hold", "hold", "check", "record"]),
        st.sampled_from("ab"),
        st.integers(0, 4),
        st.sampled_from([None, "pro"]),
    ),
    min_size=1,
    max_size=25,
)


def test_bucket_table_decides_like_the_memory_store(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(
            "CREATE TEMPORARY TABLE replay (key text, bucket timestamptz, count bigint, UNIQUE (key, bucket))"
        )

        @settings(max_examples=min(60, EXAMPLES))
        @given(steps, st.booleans(), st.sampled_from([1, 7, 60]))
        def search(trace: list[tuple[int, str, str, int, str | None]], strict: bool, buckets: int) -> None:
            connection.execute("TRUNCATE replay")
            shape: dict[str, Any] = {"strict": strict, "buckets": buckets}
            rules = (
                sliding_window("5/hour", name="own", scope="user", tiers={"pro": "9/hour"}, **shape),
                sliding_window("8/hour", name="all", scope="*", **shape),
            )
            clock = FakeClock(TEN.timestamp())
            limiter = Limiter(*rules, clock=clock)
            table = BucketTable(*rules, table="replay", plain="user")
            for advance, operation, who, cost, tier in trace:
                clock.advance_us(advance)
                now, key = datetime.fromtimestamp(clock.now, UTC), {"user": who}
                if operation == "record":
                    table.record(connection, key, cost, now=now)
                    limiter.record(key, cost, tier=tier)
                elif operation == "hold":
                    decision = table.hold(connection, key, cost, tier=tier, now=now).decision
                    assert decision == limiter.hit(key, cost, tier=tier)
                else:
                    decision = table.check(connection, key, cost, tier=tier, now=now).decision
                    assert decision == limiter.check(key, cost, tier=tier)

        search()


# --- Several scopes ---------------------------------------------------------------------------------------------------

THREE = (
    sliding_window("2/hour", scope="submitter"),
    sliding_window("3/hour", scope="realm"),
    sliding_window("5/hour", scope="*"),
)


def test_rules_that_count_by_the_same_key_share_its_rows(connection: psycopg.Connection, table: str) -> None:
    buckets = BucketTable(
        sliding_window("3/hour", buckets=60), sliding_window("5/day", buckets=1440), table=table
    )
    assert [bool(hold(connection, buckets, "a", now=at(0))) for _ in range(4)] == [True, True, True, False]
    assert [bool(hold(connection, buckets, "a", now=at(61))) for _ in range(4)] == [True, True, False, False]
    assert [count for _, _, count in rows(connection, table)] == [3, 2]


def test_plain_key_cannot_match_a_key_of_another_scope(
    connection: psycopg.Connection, table: str, uuids: str
) -> None:
    texts = BucketTable(*THREE, table=table, plain="submitter")
    hold(connection, texts, {"submitter": "ada", "realm": "north"})
    for (key, _, _), spelt in zip(rows(connection, table), ["@*", "@realm:north", "ada"], strict=True):
        assert key == spelt
        if key != "ada":
            with pytest.raises(ConfigError, match="begins with '@'"):
                texts.check(connection, {"submitter": key, "realm": "south"})
    ids = BucketTable(*THREE, table=uuids, key_type="uuid", plain="submitter")
    mine = uuid4()
    hold(connection, ids, {"submitter": mine, "realm": "north"})
    others = [key for key, _, _ in rows(connection, uuids) if key != mine]
    assert len(others) == 2
    for key in others:
        with pytest.raises(ConfigError, match="version 8"):
            ids.check(connection, {"submitter": key, "realm": "south"})


# --- Transactions -----------------------------------------------------------------------------------------------------


def test_units_are_rolled_back_with_the_work(connection: psycopg.Connection, table: str) -> None:
    buckets = BucketTable("2/hour", table=table)
    for _ in range(3):
        with connection.transaction(force_rollback=True):
            assert buckets.hold(connection, "a", 2)
            assert not buckets.hold(connection, "a")
            buckets.record(connection, "a", 7)
        assert rows(connection, table) == []
    with connection.transaction():
        with connection.transaction(force_rollback=True):  # a savepoint
            assert buckets.hold(connection, "a", 2)
        assert buckets.hold(connection, "a", 1)
    assert buckets.check(connection, "a").binding.count == 1


def test_parallel_transactions_get_exactly_the_limit(url: str, table: str) -> None:
    """All hold before any commits: a count read before the wait for the lock would admit them all."""
    buckets = BucketTable("3/hour", table=table)

    def submit(number: int) -> bool:
        with psycopg.connect(url) as connection:
            connection.execute("SELECT 1")  # begin the transaction, with its snapshot
            return buckets.hold(connection, "a").allowed

    with ThreadPoolExecutor(11) as pool, psycopg.connect(url) as first:
        assert buckets.hold(first, "a")
        others = [pool.submit(submit, number) for number in range(11)]
        await_waiters(url, 11)
        first.commit()
        assert sum(other.result() for other in others) == 2
        assert buckets.check(first, "a").binding.count == 3


def test_rollback_frees_units_for_a_waiting_transaction(url: str, table: str) -> None:
    buckets = BucketTable("1/hour", table=table)

    def submit() -> bool:
        with psycopg.connect(url) as second:
            return buckets.hold(second, "a").allowed

    with psycopg.connect(url) as first, ThreadPoolExecutor(1) as pool:
        assert buckets.hold(first, "a")
        waiting = pool.submit(submit)
        await_waiters(url, 1)
        first.rollback()
        assert waiting.result()


def await_waiters(url: str, count: int) -> None:
    """Return when this number of sessions wait for an advisory lock."""
    query = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    end = time.monotonic() + 60
    with psycopg.connect(url, autocommit=True) as connection:
        while len(connection.execute(query).fetchall()) < count:
            assert time.monotonic() < end, "nobody waits"


def test_several_scopes_in_parallel_are_exact_and_never_deadlock(url: str, uuids: str) -> None:
    buckets = BucketTable(*THREE, table=uuids, key_type="uuid", plain="submitter")
    people = [UUID(int=number) for number in range(1, 5)]
    realms = ["north", "south"]

    def submit(number: int) -> bool:
        key = {"submitter": people[number % 4], "realm": realms[number // 4 % 2]}
        with psycopg.connect(url) as connection:
            return buckets.hold(connection, key).allowed

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(submit, range(40))) == 5
    with psycopg.connect(url) as connection:
        usages = buckets.check(connection, {"submitter": people[0], "realm": "north"}).usages
        assert usages[0].count <= 2
        assert usages[1].count <= 3
        assert usages[2].count == 5


@pytest.mark.parametrize("level", [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE])
def test_higher_isolation_is_refused(url: str, table: str, level: IsolationLevel) -> None:
    buckets = BucketTable("2/hour", table=table)
    with psycopg.connect(url) as connection:
        connection.isolation_level = level
        words = level.name.replace("_", " ")
        with pytest.raises(StoreConflict, match=f"READ COMMITTED, not {words}"):
            buckets.hold(connection, "a")
        with pytest.raises(StoreConflict, match="READ COMMITTED"):
            buckets.record(connection, "a")
        assert buckets.check(connection, "a")  # a check needs no lock
        connection.rollback()
        assert rows(connection, table) == []


def test_units_need_a_transaction_to_commit_with(connection: psycopg.Connection, table: str) -> None:
    buckets = BucketTable("2/hour", table=table)
    with pytest.raises(ConfigError, match="need a transaction"):
        buckets.hold(connection, "a")
    with pytest.raises(ConfigError, match="need a transaction"):
        buckets.record(connection, "a")
    assert rows(connection, table) == []


def test_commit_setting_of_the_user_is_not_changed(connection: psycopg.Connection, table: str) -> None:
    buckets = BucketTable("2/hour", table=table)
    for setting in ("on", "off"):
        connection.execute(f"SET synchronous_commit = {setting}".encode())
        with connection.transaction():
            buckets.hold(connection, "a")
            assert connection.execute("SHOW synchronous_commit").fetchone() == (setting,)


def test_any_row_factory_and_cursor_class_works(url: str, table: str) -> None:
    buckets = BucketTable("2/hour", table=table)
    with psycopg.connect(url, row_factory=dict_row, cursor_factory=psycopg.ClientCursor) as connection:
        assert buckets.hold(connection, "a")
        assert buckets.check(connection, "a").binding.count == 1


def test_a_check_is_one_statement_and_a_hold_two(
    connection: psycopg.Connection, uuids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    statements: list[str] = []
    execute = module._execute

    def note(on: psycopg.Connection, statement: Any) -> Any:
        statements.append(statement[0])
        return execute(on, statement)

    monkeypatch.setattr(module, "_execute", note)
    buckets = BucketTable(*THREE, table=uuids, key_type="uuid", plain="submitter")
    key = {"submitter": uuid4(), "realm": "north"}
    buckets.check(connection, key)
    assert len(statements) == 1
    hold(connection, buckets, key)
    assert len(statements) == 3


def test_check_uses_an_index(connection: psycopg.Connection, table: str) -> None:
    connection.execute(
        f"INSERT INTO {table} (key, bucket) SELECT 'k' || number % 500, now() - number * interval '1 minute' "
        f"FROM generate_series(1, 20000) AS number".encode()
    )
    connection.execute(f"ANALYZE {table}".encode())
    statement, parameters = next(BucketTable("10/hour", table=table)._checking("k7", 1, None, None))
    plan = psycopg.RawCursor(connection).execute(f"EXPLAIN {statement}".encode(), parameters).fetchall()
    assert any("Index Scan" in line for (line,) in plan)
    assert not any("Seq Scan" in line for (line,) in plan)


# --- Coroutines ---------------------------------------------------------------------------------------------------------

Connect = Callable[[str], Any]


@pytest.mark.parametrize(
    "connect", [psycopg.AsyncConnection.connect, asyncpg.connect], ids=["psycopg", "asyncpg"]
)
async def test_tasks_get_exactly_the_limit(url: str, uuids: str, connect: Connect) -> None:
    buckets = AsyncBucketTable(*THREE, table=uuids, key_type="uuid", plain="submitter")
    key = {"submitter": uuid4(), "realm": "north"}

    async def submit() -> BucketDecision:
        connection = await connect(url)
        try:
            async with connection.transaction():
                decision = await buckets.hold(connection, key)
                await asyncio.sleep(0)
                return decision
        finally:
            await connection.close()

    decisions = await asyncio.gather(*(submit() for _ in range(8)))
    assert sum(map(bool, decisions)) == 2
    connection = await connect(url)
    decision = await buckets.check(connection, key)
    assert [usage.count for usage in decision.usages] == [2, 2, 2]
    async with connection.transaction():
        await buckets.record(connection, key, 4)
    assert [usage.count for usage in (await buckets.check(connection, key)).usages] == [6, 6, 6]
    await connection.close()


@pytest.mark.parametrize(
    "connect", [psycopg.AsyncConnection.connect, asyncpg.connect], ids=["psycopg", "asyncpg"]
)
async def test_tasks_roll_back_and_need_a_valid_transaction(url: str, table: str, connect: Connect) -> None:
    buckets = AsyncBucketTable("2/hour", table=table)
    connection = await connect(url)
    if isinstance(connection, psycopg.AsyncConnection):
        await connection.set_autocommit(True)

    async def submit_and_fail() -> None:
        async with connection.transaction():
            assert await buckets.hold(connection, "a", 2, now=at(0))
            raise LookupError("the work failed")

    with pytest.raises(LookupError):
        await submit_and_fail()
    assert (await buckets.check(connection, "a", now=at(0))).binding.count == 0
    with pytest.raises(ConfigError, match="need a transaction"):
        await buckets.hold(connection, "a")
    await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    with pytest.raises(StoreConflict, match="REPEATABLE READ"):
        await buckets.hold(connection, "a")
    await connection.execute("ROLLBACK")
    await connection.close()


async def test_another_kind_of_connection_is_refused(table: str) -> None:
    with pytest.raises(ConfigError, match="psycopg or asyncpg"):
        await AsyncBucketTable("2/hour", table=table).hold(object(), "a")
