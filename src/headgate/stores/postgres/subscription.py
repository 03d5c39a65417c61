"""A connection on which a database wakes the waiting calls of this process."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import psycopg
from psycopg import sql

from headgate.errors import StoreUnavailable
from headgate.stores.postgres.endpoint import PostgresEndpoint

LEAST_CONNECT_TIMEOUT = 2
"""Seconds; libpq has no shorter one."""


class PostgresSubscription:
    """See `Subscription`.

    Args:
        endpoint: The database.
        process: The process whose messages to receive.
        deadline: Seconds for connecting.

    Raises:
        StoreError: The database is down or refuses, or a pooler is before it.
    """

    def __init__(self, endpoint: PostgresEndpoint, process: str, deadline: float) -> None:
        self._endpoint = endpoint
        self._connection: psycopg.Connection[Any] | None = None
        seconds = max(LEAST_CONNECT_TIMEOUT, ceil(deadline))
        try:
            self._connection = psycopg.connect(endpoint.conninfo, autocommit=True, connect_timeout=seconds)
            self._check_directness(self._connection)
            self._connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(f"headgate_{process}")))
        except psycopg.Error as error:
            self.close()
            raise endpoint.error(error) from error

    def receive(self, seconds: float) -> Sequence[str]:
        assert self._connection is not None
        try:
            messages = self._connection.notifies(timeout=seconds, stop_after=1)
            return [message.payload for message in messages]
        except psycopg.Error as error:
            raise self._endpoint.error(error) from error

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _check_directness(self, connection: psycopg.Connection[Any]) -> None:
        """Refuse a pooler: it would hand a session that listens to other clients, and messages would not arrive here."""
        ((number,),) = connection.execute("SELECT pg_backend_pid()").fetchall()
        if number != connection.info.backend_pid:
            self.close()
            raise StoreUnavailable(
                f"{self._endpoint.name} is behind a pooler, through which it cannot wake calls"
            )
