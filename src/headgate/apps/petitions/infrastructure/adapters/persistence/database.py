"""Connections to PostgreSQL, and transactions that several parts share.

Inside `transaction()` every `connection()` of the same task is that transaction's, so a petition, its event and its count
are written by three parts that know nothing of each other, and kept together or not at all.

When the database fails, everything is denied: nobody can say then how much was submitted. Once no connection could be had,
that verdict stands for a while, so that an outage costs one time-out and not one per request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import psycopg
import structlog
from psycopg import AsyncConnection, IsolationLevel
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout, TooManyRequests

from headgate.apps.petitions.domain.errors import DatabaseUnavailableError

Connection = AsyncConnection[tuple[Any, ...]]

_STATEMENT_TIMEOUT = "10s"
_RETRY_SECONDS = 1

_current: ContextVar[tuple[Database, Connection] | None] = ContextVar("petition_transaction", default=None)


class Database:
    """A pool of connections.

    Args:
        url: Where PostgreSQL is.
        pool_size: Most connections.
        timeout: Seconds to wait for one.
        outage_seconds: How long nothing is tried again once none could be had.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        url: str,
        *,
        pool_size: int = 10,
        timeout: float = 5.0,
        outage_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = url
        self._outage_seconds = outage_seconds
        self._clock = clock
        self._down_until = float("-inf")
        self._probing = asyncio.Lock()
        self._pool: AsyncConnectionPool[Connection] = AsyncConnectionPool(
            url,
            min_size=1,
            max_size=pool_size,
            timeout=timeout,
            open=False,
            kwargs={"autocommit": True, "fallback_application_name": "headgate-petitions"},
            configure=_configure,
            check=AsyncConnectionPool.check_connection,  # a restarted server must not cost a request per connection
        )

    async def open(self) -> None:
        """Begin to connect."""
        await self._pool.open()

    async def aclose(self) -> None:
        """Hang up."""
        await self._pool.close()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Provide the connection of the transaction under way, or else one on which every statement is its own.

        Raises:
            DatabaseUnavailableError: There is none, or it broke.
        """
        current = _current.get()
        if current is not None and current[0] is self:
            yield current[1]
            return
        if self._clock() < self._down_until:
            raise DatabaseUnavailableError(round(self._outage_seconds))
        try:
            async with self._pool.connection() as connection:
                yield connection
        except (PoolTimeout, PoolClosed, TooManyRequests) as error:
            raise DatabaseUnavailableError(await self._verdict()) from error
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            _log().exception("database_failed")
            raise DatabaseUnavailableError(_RETRY_SECONDS) from error

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """Provide a transaction, which is kept if the block ends well; one within another is part of that."""
        async with self.connection() as connection, connection.transaction():
            token = _current.set((self, connection))
            try:
                yield connection
            finally:
                _current.reset(token)

    async def _verdict(self) -> int:
        """Return in how many seconds to come back when no connection could be had.

        All of them may just be busy, which is soon over; only a database that cannot be reached is given up for a while.
        """
        async with self._probing:
            if self._clock() < self._down_until:
                return round(self._outage_seconds)
            try:
                await (await AsyncConnection.connect(self.url)).close()
            except psycopg.OperationalError as error:
                self._down_until = self._clock() + self._outage_seconds
                _log().error(
                    "database_unavailable", error=str(error).strip(), denied_seconds=self._outage_seconds
                )
                return round(self._outage_seconds)
        _log().warning("database_busy")
        return _RETRY_SECONDS


def _log() -> Any:
    return structlog.get_logger().bind(component="petition.database")


async def _configure(connection: Connection) -> None:
    await connection.execute(f"SET statement_timeout = '{_STATEMENT_TIMEOUT}'")
    # Counts under a higher level would be as old as the transaction, whatever the database's default is.
    await connection.set_isolation_level(IsolationLevel.READ_COMMITTED)
