"""Several ASGI applications in one event loop, each on a socket of its own.

One process, because imports are most of what starting costs, and five processes would pay for most of them five times.
If one cannot start, or ends, that is reported and the others go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from headgate_server.hosting import configuration
from headgate_services.demo.errors import DemoError
from headgate_services.demo.ports import url_of

_GOODBYE_SECONDS = 2  # for requests under way
_POLL_SECONDS = 0.01


class Hosted:
    """One application, served on a socket.

    Args:
        name: What to call it.
        app: The application.
        listener: Where it listens.
        before_stop: Called when it is to stop, to end what would go on for ever.
        http: What speaks HTTP, if not uvicorn's own.
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
        """Serve it, and return once it answers.

        Raises:
            DemoError: It does not; the log says why.
        """
        self._task = asyncio.create_task(self._serve(), name=f"serve {self.name}")
        while not self._server.started:
            if self._task.done():
                raise DemoError(f"{self.name} did not start")
            await asyncio.sleep(_POLL_SECONDS)

    def on_end(self, callback: Callable[[Hosted], None]) -> None:
        """Call a function if it ends before it was stopped."""
        assert self._task is not None
        self._task.add_done_callback(lambda task: None if self._server.should_exit else callback(self))

    async def stop(self) -> None:
        """Let requests under way finish for a moment, then end it. Safe to call at any time."""
        self._server.should_exit = True
        self._before_stop()
        if self._task is not None:
            await asyncio.wait([self._task])
        self._listener.close()

    async def _serve(self) -> None:
        try:
            await self._server.serve(sockets=[self._listener])
        except SystemExit:  # how uvicorn says that an application's start-up failed
            logging.getLogger(__name__).debug("%s did not start", self.name)
        except Exception:  # whatever it raises, the other applications go on
            logging.getLogger(__name__).exception("%s failed", self.name)


class _Server(uvicorn.Server):
    """A server that leaves signals alone; the process that runs all of them handles those."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
