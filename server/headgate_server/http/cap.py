"""The connections of a server: their maximum number, and checks for stalled ones."""

from __future__ import annotations

import asyncio
import resource
from typing import TYPE_CHECKING, Any

from headgate_server.problems import Field

if TYPE_CHECKING:
    from headgate_server.http.connection import BoundedProtocol
    from headgate_server.http.output import OutputProtocol

CHECK_SECONDS = 1.0
"""Seconds between checks for stalled connections."""

MAX_UNFLUSHED = 32
"""Connections with an unwritten response before all of them are written."""

MAX_CONNECTIONS = 10_000
RESERVED_FILES = 64
"""Open files that connections leave to stores, figures and logs."""


class ConnectionCap:
    """All connections of a server.

    Attributes:
        limit: The maximum number of connections.
        waiting: Connections that wait for a request, the longest first.
        leaving: Connections that were cut and are still counted.
        is_draining: Whether every response ends its connection.
        default_fields: The header fields that uvicorn adds to every response, and their encoding.
    """

    def __init__(self) -> None:
        self.limit = min(MAX_CONNECTIONS, max(1, _open_files() - RESERVED_FILES))
        self.waiting: dict[BoundedProtocol, None] = {}
        self.leaving: set[BoundedProtocol] = set()
        self.is_draining = False
        self.default_fields: tuple[list[Field] | None, bytes] = (None, b"")
        self._is_scheduled = False
        self._unflushed: list[OutputProtocol] = []

    @classmethod
    def of(cls, server_state: Any) -> ConnectionCap:
        """Return the cap of a server, which uvicorn's state object keeps."""
        found: ConnectionCap | None = getattr(server_state, "connection_cap", None)
        if found is None:
            found = server_state.connection_cap = cls()
        return found

    def schedule_check(self, connections: set[BoundedProtocol], loop: asyncio.AbstractEventLoop) -> None:
        """Check for stalled connections every second, as long as there are connections."""
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_later(CHECK_SECONDS, self._check, connections, loop)

    def _check(self, connections: set[BoundedProtocol], loop: asyncio.AbstractEventLoop) -> None:
        self._is_scheduled = False
        now = loop.time()
        for connection in list(connections):
            connection.drop_if_stalled(now)
        if connections:
            self.schedule_check(connections, loop)

    def flush_soon(self, connection: OutputProtocol, loop: asyncio.AbstractEventLoop) -> None:
        """Write the response of a connection together with those of others.

        Between two separate writes the clients' process can fall asleep, and waking it costs as much as a response.
        """
        if not self._unflushed:
            loop.call_soon(self._flush)
        self._unflushed.append(connection)
        if len(self._unflushed) >= MAX_UNFLUSHED:
            self._flush()

    def _flush(self) -> None:
        connections, self._unflushed = self._unflushed, []
        for connection in connections:
            connection.flush()


def _open_files() -> int:
    """Raise this process's limit of open files as far as allowed and needed, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + RESERVED_FILES
    limit = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        return limit
    return wanted if soft == resource.RLIM_INFINITY else soft
