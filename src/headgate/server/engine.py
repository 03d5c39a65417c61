"""What carries requests to the application: uvicorn on uvloop and httptools, with a few bounds of our own."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headgate.hosting import configuration
from headgate.server.app import ABORT, App

HEAD_BYTES = 32_768
"""The largest request line and header fields together."""

HEAD_SECONDS = 10.0
"""How long they may be awaited on a new connection, and how long they may take to arrive once they have begun."""

_HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)


def run(app: App, listener: socket.socket, started: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM; requests under way are finished, then the stores are closed.

    Args:
        app: What to serve.
        listener: Where; it is closed at the end.
        started: Called once requests are answered.
    """
    config = configuration(app, http=BoundedProtocol, ws="none")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Engine(config, app, started).serve([listener]))


class Engine(uvicorn.Server):
    """Uvicorn's server, which ends streams before it waits, and leaves signals as it found them."""

    def __init__(self, config: uvicorn.Config, app: App, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._app = app
        self._tell_started = started

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGINT and SIGTERM; a second SIGINT does not wait for requests under way."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._tell_started()

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, BoundedProtocol):
                    connection.drop_if_stalled(now)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.end_streams()
        await super().shutdown(sockets)


class BoundedProtocol(HttpToolsProtocol):
    """Uvicorn's HTTP/1.1, with bounds on what a client may send before its request is looked at."""

    _head_bytes = 0
    _begun = 0
    """How many heads have begun in the piece that is being read."""
    _is_in_head = False
    _awaited_since: float | None = None
    """Since when a head is awaited that is not there, or not completely; `None` if none is."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._awaited_since = self.loop.time()

    def data_received(self, data: bytes) -> None:
        had_more = self._is_in_head or (self.cycle is not None and self.cycle.more_body)
        self._begun = 0
        super().data_received(data)
        if self._awaited_since is None and self.cycle is not None and self.cycle.response_complete:
            # Neither a request nor uvicorn's own timer, which every byte ends: the rest of a body that nobody reads.
            self._awaited_since = self.loop.time()
        # Where a head begins behind another request, what came with it is mostly not its own.
        if self._is_in_head and self._begun + had_more <= 1:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(_HEAD_TOO_LARGE)
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"abort": self.transport.abort}}
        self._head_bytes = 0
        self._begun += 1
        self._is_in_head = True
        self._awaited_since = self.loop.time()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._awaited_since = None
        super().on_headers_complete()

    def drop_if_stalled(self, now: float) -> None:
        """Close the connection if a head is awaited for long and is not complete."""
        if self._awaited_since is not None and now - self._awaited_since > HEAD_SECONDS:
            self.transport.close()
