"""Connections to PostgreSQL that never wait for ever.

A server that hangs accepts connections and answers nothing, and a statement that is waiting for it cannot be cancelled: that
would need an answer too. So every exchange with the server has a deadline, after which the connection is closed. What was in
a transaction that the server has not been told to commit is then undone by the server, whenever it goes on.

    with within(5.0):                           # everything in the block together has five seconds
        async with pool.connection() as connection: ...
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self, TypeVar

import psycopg
from psycopg import AsyncConnection, waiting
from psycopg.abc import PQGen

DEFAULT_LIMIT = 5.0
_NEVER = float("inf")
_LATE = "the server did not answer in time"

T = TypeVar("T")

_deadline: ContextVar[float] = ContextVar("postgres_deadline", default=_NEVER)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Give all exchanges of a block so many seconds together; a block around it may leave them less."""
    token = _deadline.set(min(_deadline.get(), asyncio.get_running_loop().time() + seconds))
    try:
        yield
    finally:
        _deadline.reset(token)


def time_left() -> float:
    """Return the seconds that `within` leaves; infinite outside of it."""
    return _deadline.get() - asyncio.get_running_loop().time()


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
            async with asyncio.timeout_at(_until(limit)):
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
        until = _until(self.limit)
        if until <= asyncio.get_running_loop().time():  # too late to begin: nothing is sent any more
            self.pgconn.finish()
            raise psycopg.OperationalError(_LATE)
        try:
            async with asyncio.timeout_at(until):
                return await waiting.wait_async(gen, self.pgconn.socket, interval, timeout)
        except TimeoutError:
            self.pgconn.finish()
            raise psycopg.OperationalError(_LATE) from None
        except asyncio.CancelledError:
            self.pgconn.finish()
            raise


def _until(limit: float) -> float:
    return min(_deadline.get(), asyncio.get_running_loop().time() + limit)
