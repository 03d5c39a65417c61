"""The output side of a connection."""

from __future__ import annotations

import asyncio
from typing import Any

from headgate_server.http.cap import ConnectionCap
from headgate_server.http.encoding import encoded_fields

UNFLUSHED_BYTES = 65_536
"""Bytes that a connection collects before it writes them at once."""


class OutputProtocol(asyncio.Protocol):
    """A connection that collects output, and waits for clients that read slowly.

    Attributes:
        transport: The transport.
        writable: The event that writers wait for; `None` if the client reads fast enough.
    """

    __slots__ = ("_cap", "_loop", "_state", "_unflushed", "transport", "writable")

    _cap: ConnectionCap
    transport: asyncio.Transport

    def __init__(self, server_state: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.writable: asyncio.Event | None = None
        self._state = server_state
        self._loop = loop
        self._cap = ConnectionCap.of(server_state)
        self._unflushed = b""
        """Output that is written before the event loop waits again."""

    def write(self, data: bytes) -> None:
        """Write to the client, soon."""
        is_first = not self._unflushed
        self._unflushed += data
        if len(self._unflushed) > UNFLUSHED_BYTES:
            self.flush()
        elif is_first:
            self._cap.flush_soon(self, self._loop)

    def flush(self) -> None:
        """Write pending output now."""
        data, self._unflushed = self._unflushed, b""
        if data and not self.transport.is_closing():
            self.transport.write(data)

    def close(self) -> None:
        """Close the connection after pending output."""
        self.flush()
        self.transport.close()

    def pause_writing(self) -> None:
        self.writable = asyncio.Event()

    def resume_writing(self) -> None:
        writable, self.writable = self.writable, None
        if writable is not None:
            writable.set()

    async def until_writable(self) -> None:
        """Wait until the client has read enough."""
        while self.writable is not None:
            await self.writable.wait()

    def default_fields(self) -> bytes:
        """Return the fields that uvicorn adds to every response; it replaces their list once a second."""
        fields = self._state.default_headers
        if fields is not self._cap.default_fields[0]:
            self._cap.default_fields = fields, encoded_fields(tuple(fields))
        return self._cap.default_fields[1]
