"""What carries requests to the application: uvicorn's server on uvloop, with connections of our own."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
import uvloop

from headgate_server.app import App
from headgate_server.hosting import configuration
from headgate_server.http_connection import BoundedProtocol

DRAIN_SECONDS = 1.0
"""How long a connection that is kept alive may still send a request when the server stops; the answer ends it."""

GARBAGE_THRESHOLD = 20_000
"""New objects after which the garbage collector looks at them."""


def run(app: App, listener: socket.socket, started: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM; requests under way are finished, then the stores are closed.

    Args:
        app: What to serve.
        listener: Where; it is closed at the end.
        started: Called once requests are answered.
    """
    config = configuration(app, http=BoundedProtocol, ws="none")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(HttpServer(config, app, started).serve([listener]))


class HttpServer(uvicorn.Server):
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
        # What there is now stays; and what requests leave behind is garbage in cycles only when they fail.
        gc.freeze()
        gc.set_threshold(GARBAGE_THRESHOLD)
        self._tell_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what was sent, and let every answer end its connection; none is closed under a request just sent."""
        self._app.end_streams()
        for server in self.servers:
            server.close()
        for connection in self._connections():
            connection.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while self.server_state.connections and not self.force_exit:  # noqa: ASYNC110  # uvicorn has no event for it
                    await asyncio.sleep(0.01)
        await super().shutdown(sockets)

    def _connections(self) -> list[BoundedProtocol]:
        connections: set[Any] = self.server_state.connections
        return [one for one in connections if isinstance(one, BoundedProtocol)]
