"""Connections to PostgreSQL with a time limit for every exchange.

A server that hangs accepts connections but does not reply, and a waiting statement cannot be cancelled, because that needs
a reply too. So every exchange with the server has a deadline, after which the connection is closed. The server rolls back
the open transaction as soon as it runs again.

    with within(5.0):                           # time limit for the whole block
        async with pool.connection() as connection: ...
"""

from __future__ import annotations

import asyncio
from typing import Any, Self, TypeVar

import psycopg
from psycopg import AsyncConnection, waiting
from psycopg.abc import PQGen

from headgate_services.common.deadlines import DEFAULT_LIMIT, deadline_after

_LATE = "the server did not answer in time"

T = TypeVar("T")


class BoundedConnection(AsyncConnection[Any]):
    """A connection with a time limit for every exchange; it is closed if the server does not reply in time.

    The limit is `limit` seconds, or less inside `within`. Cancelling an exchange closes the connection at once, because
    a cancel request to a server that hangs would have to wait too.
    """

    limit = DEFAULT_LIMIT

    @classmethod
    async def connect(cls, conninfo: str = "", *, limit: float = DEFAULT_LIMIT, **options: Any) -> Self:  # type: ignore[override]
        """Connect within `limit` seconds, which is also the limit of every exchange.

        Raises:
            OperationalError: The server refuses, or does not reply in time.
        """
        try:
            async with asyncio.timeout_at(deadline_after(limit)):
                connection = await super().connect(conninfo, **options)
        except TimeoutError:
            raise psycopg.OperationalError(_LATE) from None
        connection.limit = limit
        return connection

    async def wait(self, gen: PQGen[T], interval: float = 0.1, timeout: float | None = None) -> T:
        """Run an exchange.

        Raises:
            OperationalError: The server did not reply in time. The connection is closed.
        """
        options = {} if timeout is None else {"timeout": timeout}  # psycopg 3.2 has no such argument
        until = deadline_after(self.limit)
        if until <= asyncio.get_running_loop().time():  # too late: do not send anything
            self.pgconn.finish()
            raise psycopg.OperationalError(_LATE)
        try:
            async with asyncio.timeout_at(until):
                return await waiting.wait_async(gen, self.pgconn.socket, interval, **options)
        except TimeoutError:
            self.pgconn.finish()
            raise psycopg.OperationalError(_LATE) from None
        except asyncio.CancelledError:
            self.pgconn.finish()
            raise
