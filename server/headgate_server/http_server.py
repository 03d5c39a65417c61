"""What carries requests to the application: uvicorn's server on uvloop, with connections of our own.

They are accepted here too. Libuv accepts one in a turn of the event loop. A turn takes as long as all requests that have
come since the last one, so that of 500 clients that connect at once the last would wait for seconds, and `/healthz` too.
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
from headgate_server.begin import begin
from headgate_server.hosting import GRACE_SECONDS, configuration
from headgate_server.http_connection import BoundedProtocol, ConnectionCap

logger = logging.getLogger("headgate.server")

LEAST_ACCEPTED, ACCEPTED_SHARE = 4, 0.25
"""How many of those that wait are accepted in a turn of the event loop: so many, and this share of those that there are.

A turn with few connections is short, and other workers have theirs meanwhile: one must not take them all.
"""

ACCEPTED_AT_CAP = 8
"""How many at the cap: what makes room for them is open for another turn, and half of the spare files are for stores."""

OTHERS_TURN_SECONDS = 0.001
"""How long a worker that has accepted some leaves the rest to the other workers, which may have to wake up first."""

EARLY_BYTES = 65_536
"""How much is read of what a client has sent before it is accepted; otherwise that waits for another turn."""

KERNEL_BUFFER_BYTES = 65_536
"""Size of the kernel's send buffer and of its receive buffer per connection; Linux doubles it.

Without it Linux lets them grow to megabytes each, and clients that never read would fill the machine's TCP memory.
"""

ACCEPT_PAUSE_SECONDS = 1.0
"""How long none are accepted after the system has had no room for one."""

DRAIN_SECONDS = 1.0
"""How long a connection that is kept alive may still send a request when the server stops; the answer ends it."""

GARBAGE_THRESHOLD = 20_000
"""New objects after which the garbage collector looks at them."""


def run(
    app: App, listener: socket.socket, started: Callable[[], None], *, shares_listener: bool = False
) -> None:
    """Serve until SIGINT or SIGTERM; requests under way are finished, then the stores are closed.

    Args:
        app: What to serve.
        listener: Where; it is closed at the end.
        started: Called once requests are answered.
        shares_listener: Whether other processes accept connections there too.
    """
    config = configuration(app, http=BoundedProtocol, ws="none")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(HttpServer(config, app, started, shares_listener=shares_listener).serve([listener]))


class HttpServer(uvicorn.Server):
    """Uvicorn's server, which ends streams before it waits, and leaves signals as it found them."""

    def __init__(
        self, config: uvicorn.Config, app: App, started: Callable[[], None], *, shares_listener: bool = False
    ) -> None:
        super().__init__(config)
        self._app = app
        self._shares_listener = shares_listener
        self._tell_started = started
        self._accepting: set[Any] = set()

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
        await super().startup([])
        for listener in sockets or ():
            listener.setblocking(False)
            self._listen(listener)
        # What there is now stays; and what requests leave behind is garbage in cycles only when they fail.
        gc.freeze()
        gc.set_threshold(GARBAGE_THRESHOLD)
        self._tell_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what was sent, and let every answer end its connection; none is closed under a request just sent."""
        self._app.end_streams()
        ConnectionCap.of(self.server_state).is_draining = True
        for listener in sockets or ():
            while self._accept(listener):  # those that wait have perhaps sent a request
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
                "requests did not end within %g s and are cut off: %d", GRACE_SECONDS, len(connections)
            )
        for request in list(self.server_state.tasks):
            request.cancel()  # that it is no task keeps the event loop from doing so
        for connection in list(connections):
            connection.transport.abort()
        await super().shutdown(sockets)

    async def _wait_for_connections(self, seconds: float) -> None:
        """Return when all connections and requests have ended, or after so long, or when the stop is forced."""
        state = self.server_state
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while (self._accepting or state.connections or state.tasks) and not self.force_exit:  # noqa: ASYNC110  # uvicorn has no event for it
                    await asyncio.sleep(0.01)

    def _listen(self, listener: socket.socket) -> None:
        if not self.should_exit:
            asyncio.get_running_loop().add_reader(listener, self._accept_in_turn, listener)

    def _accept_in_turn(self, listener: socket.socket) -> None:
        """Accept some of the connections that wait, and let other workers do so before the next."""
        if self._accept(listener) and self._shares_listener:
            self._stop_listening(listener, OTHERS_TURN_SECONDS)

    def _stop_listening(self, listener: socket.socket, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(seconds, self._listen, listener)

    def _accept(self, listener: socket.socket) -> int:
        """Accept some of the connections that wait; return how many, or 0 if no more are to be accepted for now."""
        accepted, there = 0, len(self.server_state.connections)
        room = ConnectionCap.of(self.server_state).most - there - len(self._accepting)
        for _ in range(min(LEAST_ACCEPTED + int(ACCEPTED_SHARE * there), max(ACCEPTED_AT_CAP, room))):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                break  # another worker was quicker, or the client has left
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
        with suppress(OSError):  # there is nothing yet, or the connection is lost already
            protocol.early = connection.recv(EARLY_BYTES)
        begin(loop.connect_accepted_socket(lambda: protocol, connection), loop, self._accepting)
