"""Connections to PostgreSQL, and transactions that several objects share.

Inside `transaction()`, every `connection()` of the same task returns the connection of that transaction. So a petition, its
event and its count are written by three separate objects in one transaction.

While the database is down, everything is refused, because the count is unknown. A block has `timeout` seconds for the
connection, its check and all statements; then it is rolled back. If the reply to a commit is missing, the outcome is
unknown, which is a separate error. See also `common.outages`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import psycopg
import structlog
from psycopg import IsolationLevel
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout, TooManyRequests

from headgate import StoreUnavailable
from headgate_services.common.deadlines import time_left, within
from headgate_services.common.outages import Outages
from headgate_services.common.postgres import BoundedConnection
from headgate_services.petitions.domain.errors import CommitUnknownError, DatabaseUnavailableError

Connection = BoundedConnection

_RETRY_SECONDS = 1

_current: ContextVar[tuple[Database, Connection] | None] = ContextVar("petition_transaction", default=None)


class Database:
    """A pool of connections.

    Args:
        url: The address of PostgreSQL.
        pool_size: The most connections.
        timeout: Time limit for a block in seconds, from requesting a connection to the last reply.
        outage_seconds: `Retry-After` while the database cannot be reached, in seconds.
    """

    def __init__(
        self, url: str, *, pool_size: int = 10, timeout: float = 5.0, outage_seconds: float = 30.0
    ) -> None:
        self.url = url
        self._pool_size = pool_size
        self._timeout = timeout
        self._outage_seconds = outage_seconds
        self._outages = Outages("the database of petitions", timeout, self._probe)
        self._pool = self._make_pool()

    @property
    def is_down(self) -> bool:
        """Whether the database is down; requests then fail at once."""
        return self._outages.is_down

    async def open(self) -> None:
        """Open the pool."""
        await self._pool.open()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._outages.aclose()
        await self._pool.close(timeout=_RETRY_SECONDS)

    async def ping(self) -> None:
        """Run a query.

        Raises:
            DatabaseUnavailableError: The database does not reply.
        """
        async with self.connection() as connection:
            await connection.execute("SELECT 1")

    @asynccontextmanager
    async def connection(self, timeout: float | None = None) -> AsyncIterator[Connection]:
        """Provide the connection of the current transaction, or else a connection in autocommit mode.

        Args:
            timeout: Time limit for the block in seconds, instead of the default.

        Raises:
            DatabaseUnavailableError: Connecting failed, the connection broke, or the block took too long.
        """
        current = _current.get()
        if current is not None and current[0] is self:
            yield current[1]
            return
        if self.is_down:
            raise DatabaseUnavailableError(round(self._outage_seconds))
        seconds = self._timeout if timeout is None else timeout
        try:
            with within(seconds):
                # Not `pool.connection()`, which commits again at the end, when the time may be over.
                pool = self._pool
                connection = await pool.getconn(time_left())
                connection.limit = seconds
                try:
                    yield connection
                finally:
                    await pool.putconn(connection)
        except (PoolTimeout, PoolClosed, TooManyRequests) as error:
            await self._outages.report(error)
            raise DatabaseUnavailableError(_RETRY_SECONDS) from error
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            _log().exception("database_failed")
            await self._outages.report(error)
            raise DatabaseUnavailableError(_RETRY_SECONDS) from error

    @asynccontextmanager
    async def transaction(self, timeout: float | None = None) -> AsyncIterator[Connection]:
        """Provide a transaction that is committed at the end of the block; nested blocks are part of the outer one.

        Raises:
            CommitUnknownError: The server did not confirm the commit; the changes may be stored or not.
            DatabaseUnavailableError: Nothing was stored.
        """
        outermost = _current.get() is None
        is_complete = False
        async with self.connection(timeout) as connection:
            try:
                async with connection.transaction():
                    token = _current.set((self, connection))
                    try:
                        yield connection
                        is_complete = True
                    finally:
                        _current.reset(token)
            except psycopg.OperationalError as error:
                if outermost and is_complete and connection.broken:
                    _log().exception("database_commit_unknown")
                    await self._outages.report(error)
                    raise CommitUnknownError(_RETRY_SECONDS) from error
                raise

    async def _probe(self) -> None:
        """Query the database on a separate connection."""
        try:
            async with await BoundedConnection.connect(self.url, limit=self._timeout) as connection:
                await connection.execute("SELECT 1")
        except (psycopg.Error, OSError) as error:
            if not self.is_down:
                _log().error("database_unavailable", error=str(error).strip())
            raise StoreUnavailable(str(error).strip()) from error
        if not self.is_down:
            _log().warning("database_busy")
            return
        # The old pool waits longer and longer between attempts to connect; a new one connects at once.
        old, self._pool = self._pool, self._make_pool()
        await self._pool.open()
        _log().warning("database_available")
        await old.close(timeout=_RETRY_SECONDS)

    def _make_pool(self) -> AsyncConnectionPool[Connection]:
        return AsyncConnectionPool(
            self.url,
            connection_class=BoundedConnection,
            min_size=1,
            max_size=self._pool_size,
            timeout=self._timeout,
            open=False,
            kwargs={
                "autocommit": True,
                "fallback_application_name": "headgate-petitions",
                "limit": self._timeout,
            },
            configure=self._configure,
            check=AsyncConnectionPool.check_connection,  # connections break when the server restarts
        )

    async def _configure(self, connection: Connection) -> None:
        # The server has to end statements that we stopped waiting for, even if the network is down.
        for setting in ("statement_timeout", "idle_in_transaction_session_timeout"):
            await connection.execute(f"SET {setting} = {round(self._timeout * 1000)}")
        # With a higher isolation level, counts would be as old as the transaction.
        await connection.set_isolation_level(IsolationLevel.READ_COMMITTED)


def _log() -> Any:
    return structlog.get_logger().bind(component="petition.database")
