"""Uvicorn's server on uvloop, with custom connections and a custom way to accept them.

Libuv accepts one connection per iteration of the event loop. An iteration takes as long as all requests that arrived since
the last one, so the last of 500 clients that connect at once would wait for seconds, and `/healthz` too.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
import uvloop

from headgate_server.app import App
from headgate_server.hosting import GRACE_SECONDS, configuration
from headgate_server.http.cap import ConnectionCap
from headgate_server.http.connection import BoundedProtocol
from headgate_server.http.taskless import run_without_task

logger = logging.getLogger("headgate.server")

MIN_ACCEPTED, ACCEPTED_SHARE = 4, 0.25
"""Connections accepted per iteration of the event loop: this number, plus this share of the open connections.

Pending connections beyond this number are left to other workers.
"""

ACCEPTED_AT_CAP = 8
"""Connections accepted per iteration at the cap: connections that are cut for them stay open until the next iteration."""

OTHER_WORKERS_SECONDS = 0.001
"""Seconds for which a worker that accepted connections leaves the rest to other workers, which may have to wake up first."""

EARLY_BYTES = 65_536
"""Bytes that are read from a client immediately after it is accepted, instead of in the next iteration."""

KERNEL_BUFFER_BYTES = 65_536
"""Size of the kernel's send buffer and of its receive buffer per connection; Linux doubles it.

By default Linux lets them grow to megabytes each, and clients that never read would fill the machine's TCP memory.
"""

ACCEPT_PAUSE_SECONDS = 1.0
"""Seconds without accepting after the system had no resources for a connection."""

DRAIN_SECONDS = 1.0
"""Seconds in which an idle connection may still send a request when the server stops; the response ends it."""

GARBAGE_THRESHOLD = 20_000
"""Threshold of the garbage collector's youngest generation."""


def run(
    app: App, listener: socket.socket, started: Callable[[], None], *, shares_listener: bool = False
) -> None:
    """Serve until SIGINT or SIGTERM, finish the requests in progress, and close the stores.

    Args:
        app: The application.
        listener: The listening socket; it is closed at the end.
        started: Called once requests are answered.
        shares_listener: Whether other processes accept connections from the same socket.
    """
    config = configuration(app, http=BoundedProtocol, ws="none")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(HttpServer(config, app, started, shares_listener=shares_listener).serve([listener]))


class HttpServer(uvicorn.Server):
    """Uvicorn's server with bounded connections; it ends streams before it waits, and restores signal handlers."""

    def __init__(
        self, config: uvicorn.Config, app: App, started: Callable[[], None], *, shares_listener: bool = False
    ) -> None:
        super().__init__(config)
        self._app = app
        self._shares_listener = shares_listener
        self._started_callback = started
        self._accepting: set[Any] = set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGINT and SIGTERM; a second SIGINT does not wait for requests in progress."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        for listener in sockets or ():
            listener.setblocking(False)
            self._listen(listener)
        # Existing objects are never freed, and only failed requests leave reference cycles.
        gc.freeze()
        gc.set_threshold(GARBAGE_THRESHOLD)
        self._started_callback()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer requests that were sent, and close each connection after its response."""
        self._app.end_streams()
        ConnectionCap.of(self.server_state).is_draining = True
        for listener in sockets or ():
            while self._accept(listener):  # waiting connections may have sent a request
                pass
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        connections: set[Any] = self.server_state.connections
        for connection in list(connections):
            connection.drain()
        await self._wait_for_connections(DRAIN_SECONDS)
        for connection in list(connections):
            connection.shutdown()
        await self._wait_for_connections(GRACE_SECONDS)
        if connections and not self.force_exit:
            logger.warning(
                "%d requests did not end within %g s and are cut off", len(connections), GRACE_SECONDS
            )
        for request in list(self.server_state.tasks):
            request.cancel()  # the event loop cancels only tasks
        for connection in list(connections):
            connection.transport.abort()
        await super().shutdown(sockets)

    async def _wait_for_connections(self, seconds: float) -> None:
        """Wait for the end of all connections and requests, at most `seconds`, unless the stop is forced."""
        state = self.server_state
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while (self._accepting or state.connections or state.tasks) and not self.force_exit:  # noqa: ASYNC110  # uvicorn has no event for it
                    await asyncio.sleep(0.01)

    def _listen(self, listener: socket.socket) -> None:
        if not self.should_exit:
            asyncio.get_running_loop().add_reader(listener, self._accept_in_turn, listener)

    def _accept_in_turn(self, listener: socket.socket) -> None:
        """Accept some of the waiting connections, and then let other workers accept."""
        if self._accept(listener) and self._shares_listener:
            self._stop_listening(listener, OTHER_WORKERS_SECONDS)

    def _stop_listening(self, listener: socket.socket, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(seconds, self._listen, listener)

    def _accept(self, listener: socket.socket) -> int:
        """Accept some of the waiting connections; return their number, or 0 to stop accepting for now."""
        accepted, present = 0, len(self.server_state.connections)
        room = ConnectionCap.of(self.server_state).limit - present - len(self._accepting)
        for _ in range(min(MIN_ACCEPTED + int(ACCEPTED_SHARE * present), max(ACCEPTED_AT_CAP, room))):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                break  # another worker accepted it, or the client is gone
            except OSError as error:
                logger.error("no connections are accepted for %g s: %s", ACCEPT_PAUSE_SECONDS, error)  # noqa: TRY400
                self._stop_listening(listener, ACCEPT_PAUSE_SECONDS)
                return 0
            accepted += 1
            self._connect(connection)
        return accepted

    def _connect(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, buffer, KERNEL_BUFFER_BYTES)
        protocol = BoundedProtocol(self.config, self.server_state, self.lifespan.state)
        with suppress(OSError):  # nothing has arrived, or the connection is lost
            protocol.early = connection.recv(EARLY_BYTES)
        run_without_task(loop.connect_accepted_socket(lambda: protocol, connection), loop, self._accepting)
