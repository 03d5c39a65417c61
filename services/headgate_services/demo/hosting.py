"""Several ASGI applications in one event loop, each on its own socket, until a signal to stop.

One process, because imports take most of the start time, and five processes would repeat most of them. If an
application cannot start, or ends, this is reported and the other applications continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Collection, Iterator
from typing import Any

import uvicorn

from headgate_server.hosting import MAX_PORT, PortTaken, configuration, listen, url_of
from headgate_services.demo import DemoError

_GOODBYE_SECONDS = 2  # for requests in progress
_POLL_SECONDS = 0.01
_NEXT_PORTS = 100  # number of ports to try before the system chooses one


class Hosted:
    """One application, served on a socket.

    Args:
        name: The name in messages.
        app: The application.
        listener: The socket to listen on.
        before_stop: Called before it stops, to end endless streams.
        http: The HTTP protocol class, if not uvicorn's own.
    """

    def __init__(
        self,
        name: str,
        app: Any,
        listener: socket.socket,
        before_stop: Callable[[], None] = lambda: None,
        http: Any = "auto",
    ) -> None:
        self.name = name
        self.url = url_of(listener)
        self._listener = listener
        self._before_stop = before_stop
        self._server = _Server(
            configuration(app, http=http, ws="none", timeout_graceful_shutdown=_GOODBYE_SECONDS)
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve the application, and return once it answers.

        Raises:
            DemoError: It does not start; the log has the reason.
        """
        self._task = asyncio.create_task(self._serve(), name=f"serve {self.name}")
        while not self._server.started:
            if self._task.done():
                raise DemoError(f"{self.name} did not start")
            await asyncio.sleep(_POLL_SECONDS)

    def on_end(self, callback: Callable[[Hosted], None]) -> None:
        """Set a function to call if the application ends without `stop`."""
        assert self._task is not None
        self._task.add_done_callback(lambda task: None if self._server.should_exit else callback(self))

    async def stop(self) -> None:
        """Wait briefly for requests in progress, then end the application. Safe to call at any time."""
        self._server.should_exit = True
        self._before_stop()
        if self._task is not None:
            await asyncio.wait([self._task])
        self._listener.close()

    async def _serve(self) -> None:
        try:
            await self._server.serve(sockets=[self._listener])
        except SystemExit:  # raised by uvicorn if an application's start-up failed
            logging.getLogger(__name__).debug("%s did not start", self.name)
        except Exception:  # an error of one application must not end the others
            logging.getLogger(__name__).exception("%s failed", self.name)


class _Server(uvicorn.Server):
    """A server without signal handlers; `StopSignals` handles the signals of the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class StopSignals:
    """Ctrl-C, `kill` and the end of the terminal; a second one ends the process at once.

    Attributes:
        received: Set by the first signal.
    """

    def __init__(self) -> None:
        self.received = asyncio.Event()
        self._numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup
            self._numbers.append(signal.SIGHUP)
        self.listen()

    def listen(self) -> None:
        """Handle the signals; call it again if another handler was set since."""
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.add_signal_handler(number, self._stop)

    def _stop(self) -> None:
        self.received.set()
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)


def listen_near(host: str, port: int, reserved: Collection[int] = ()) -> socket.socket:
    """Listen on a port or, if it is taken, on one of the next.

    Args:
        host: An address of the loopback interface.
        port: The preferred port; 0 for any.
        reserved: Ports that other applications prefer.

    Raises:
        ConfigError: The address does not exist.
    """
    following = range(port + 1, min(port + _NEXT_PORTS, MAX_PORT + 1)) if port else ()
    for candidate in (port, *(each for each in following if each not in reserved)):
        try:
            return listen(host, candidate)
        except PortTaken:
            continue
    return listen(host, 0)
