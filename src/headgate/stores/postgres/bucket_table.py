"""Sliding-window counters in a table of the application, inside its transactions.

    CREATE TABLE uploads (
        account uuid NOT NULL, minute timestamptz NOT NULL, count integer NOT NULL, UNIQUE (account, minute)
    );

A row has the units that a key used in one bucket of time. Units counted in a transaction are committed or rolled back
together with the work: nothing must be given back when the work fails.

Exactness: under READ COMMITTED each statement sees the rows committed before it began. A separate statement locks the keys
first, always in the same order. The next statement sees the commits that the lock waited for, reads the clock, counts and
charges. If one statement did both, it would count rows from before the wait, and admit too many. Under REPEATABLE READ and
above, the count would be as old as the transaction, so these levels are refused. The locks are advisory, because a fresh key
has no row to lock, and end with the transaction.

Rules define the limits, as for a limiter. They must be sliding windows with buckets of one width. The database's clock is
used.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from headgate._checks import check_kind
from headgate._steps import run, run_async
from headgate.errors import ConfigError
from headgate.stores.postgres.buckets import BucketDecision, BucketKey, Buckets, Cleanup, Row, Statement

DEFAULT_BATCH = 1_000


class BucketTable(Buckets):
    """A bucket table for connections of psycopg; see `Buckets` for the arguments."""

    def check(
        self,
        connection: psycopg.Connection[Any],
        key: BucketKey | None = None,
        cost: int = 1,
        *,
        tier: str | None = None,
        now: datetime | None = None,
    ) -> BucketDecision:
        """Return the decision of `hold` without counting; one statement, in a transaction or not."""
        return run(self._checking(key, cost, tier, now), partial(_execute, connection))

    def hold(
        self,
        connection: psycopg.Connection[Any],
        key: BucketKey | None = None,
        cost: int = 1,
        *,
        tier: str | None = None,
        now: datetime | None = None,
    ) -> BucketDecision:
        """Count units in the connection's transaction if all rules admit them; a refusal counts nothing.

        Other calls of `hold` and `record` for the same keys wait until the transaction ends; with a shared scope (`"*"`),
        all of them do. Call it late in the transaction, and with all keys at once: two transactions that hold the same
        keys one by one in opposite orders deadlock, and PostgreSQL ends one of them with an error.

        Raises:
            ConfigError: The connection is not in a transaction, or the key does not fit.
            CostTooHigh: The cost is above a limit.
            StoreConflict: The transaction is REPEATABLE READ or SERIALIZABLE.
        """
        _check_transaction(connection)
        return run(self._holding(key, cost, tier, now), partial(_execute, connection))

    def record(
        self,
        connection: psycopg.Connection[Any],
        key: BucketKey | None = None,
        cost: int = 1,
        *,
        now: datetime | None = None,
    ) -> None:
        """Count units in the connection's transaction, even beyond the limits; raises like `hold`."""
        _check_transaction(connection)
        run(self._recording(key, cost, now), partial(_execute, connection))

    def cleanup(
        self,
        connection: psycopg.Connection[Any],
        *,
        older_than: timedelta | None = None,
        batch: int = DEFAULT_BATCH,
        now: datetime | None = None,
    ) -> Cleanup:
        """Remove buckets that began more than `older_than` ago, by default all that no longer count.

        Each `batch` of rows is removed in a separate transaction, or all of them in the caller's transaction if there is
        one. Does nothing while another instance cleans up.
        """

        def execute(statement: Statement) -> Sequence[Row]:
            with _checked(connection).transaction():
                return _execute(connection, statement)

        return run(self._cleaning(older_than, batch, now), execute)


class AsyncBucketTable(Buckets):
    """A bucket table for connections of psycopg (`AsyncConnection`) or asyncpg; see `Buckets` for the arguments."""

    async def check(
        self,
        connection: Any,
        key: BucketKey | None = None,
        cost: int = 1,
        *,
        tier: str | None = None,
        now: datetime | None = None,
    ) -> BucketDecision:
        """Return the decision of `hold` without counting; one statement, in a transaction or not."""
        return await run_async(self._checking(key, cost, tier, now), partial(_aexecute, connection))

    async def hold(
        self,
        connection: Any,
        key: BucketKey | None = None,
        cost: int = 1,
        *,
        tier: str | None = None,
        now: datetime | None = None,
    ) -> BucketDecision:
        """Count units in the connection's transaction if all rules admit them; see `BucketTable.hold`."""
        _check_transaction(connection)
        return await run_async(self._holding(key, cost, tier, now), partial(_aexecute, connection))

    async def record(
        self, connection: Any, key: BucketKey | None = None, cost: int = 1, *, now: datetime | None = None
    ) -> None:
        """Count units in the connection's transaction, even beyond the limits; raises like `hold`."""
        _check_transaction(connection)
        await run_async(self._recording(key, cost, now), partial(_aexecute, connection))

    async def cleanup(
        self,
        connection: Any,
        *,
        older_than: timedelta | None = None,
        batch: int = DEFAULT_BATCH,
        now: datetime | None = None,
    ) -> Cleanup:
        """Remove old buckets; see `BucketTable.cleanup`."""

        async def execute(statement: Statement) -> Sequence[Row]:
            async with _async_checked(connection).transaction():
                return await _aexecute(connection, statement)

        return await run_async(self._cleaning(older_than, batch, now), execute)


def _execute(connection: psycopg.Connection[Any], statement: Statement) -> Sequence[Row]:
    # Not the connection's cursor, which may have another class or row factory.
    cursor = psycopg.RawCursor(_checked(connection), row_factory=tuple_row)
    cursor.execute(*statement)
    return cursor.fetchall() if _has_rows(cursor) else ()


async def _aexecute(connection: Any, statement: Statement) -> Sequence[Row]:
    text, parameters = statement
    if not isinstance(connection, psycopg.AsyncConnection):  # a connection of asyncpg
        rows: Sequence[Row] = await _async_checked(connection).fetch(text, *parameters)
        return rows
    cursor = psycopg.AsyncRawCursor(connection, row_factory=tuple_row)
    await cursor.execute(text, parameters)
    return await cursor.fetchall() if _has_rows(cursor) else ()


def _checked(connection: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    return check_kind(
        "connection", connection, psycopg.Connection, "one of psycopg, as psycopg.connect() returns"
    )


def _async_checked(connection: Any) -> Any:
    kind = psycopg.AsyncConnection if not hasattr(connection, "fetch") else object
    return check_kind("connection", connection, kind, "an AsyncConnection of psycopg, or one of asyncpg")


def _has_rows(cursor: Any) -> bool:
    return bool(cursor.pgresult.nfields)  # `description` would be computed on each access


def _check_transaction(connection: Any) -> None:
    """Refuse a connection that is not in a transaction."""
    if isinstance(connection, (psycopg.Connection, psycopg.AsyncConnection)):
        idle = connection.info.transaction_status == TransactionStatus.IDLE
        is_open = not (connection.autocommit and idle)  # without autocommit, the first statement begins one
    elif hasattr(connection, "is_in_transaction"):
        is_open = connection.is_in_transaction()
    else:
        raise ConfigError(f"connection must be one of psycopg or asyncpg, not {connection!r}")
    if not is_open:
        raise ConfigError(
            "hold and record need a transaction, so that units are committed with the work; begin one"
        )
