"""Connections to PostgreSQL that never wait for ever.

A server that hangs accepts connections and answers nothing, and a statement that is waiting for it cannot be cancelled: that
would need an answer too. So every exchange with the server has a deadline, after which the connection is closed. What was in
a transaction that was not committed is then rolled back by the server, whenever it goes on.

    with within(5.0):                           # everything in the block together has five seconds
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
    """A connection whose every exchange with the server ends: by an answer, or by closing the connection.

    An exchange has `limit` seconds, and no longer than `within` leaves. One that is cancelled closes the connection at
    once: asking a server that hangs to cancel it would take as long as the exchange itself.
    """

    limit = DEFAULT_LIMIT

    @classmethod
    async def connect(cls, conninfo: str = "", *, limit: float = DEFAULT_LIMIT, **options: Any) -> Self:  # type: ignore[override]
        """Connect within `limit` seconds, which is then what every exchange has.

        Raises:
            OperationalError: The server does not answer in time, or refuses.
        """
        try:
            async with asyncio.timeout_at(deadline_after(limit)):
                connection = await super().connect(conninfo, **options)
        except TimeoutError:
            raise psycopg.OperationalError(_LATE) from None
        connection.limit = limit
        return connection

    async def wait(self, gen: PQGen[T], interval: float = 0.1, timeout: float | None = None) -> T:
        """Run an exchange to its end.

        Raises:
            OperationalError: There was no answer in time. The connection is closed.
        """
        options = {} if timeout is None else {"timeout": timeout}  # psycopg 3.2 does not know it
        until = deadline_after(self.limit)
        if until <= asyncio.get_running_loop().time():  # too late to begin: nothing is sent any more
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
