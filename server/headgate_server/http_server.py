"""What carries requests to the application: uvicorn on uvloop and httptools, with a few bounds of our own.

A connection has a few requests in its pipe at most; one that takes nothing of what was written for long is cut. There is a
cap on connections. At the cap a new one takes the place of the one that has been waiting for a request for longest; if all
are busy, a few more are let in for `/healthz` alone, so that a server under load is not taken for dead.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import islice
from typing import Any

import uvicorn
import uvloop
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from headgate_server.app import ABORT, DIRECT, App, Receive, Scope, Send
from headgate_server.hosting import configuration
from headgate_server.problems import Field

HEAD_BYTES = 32_768
"""The largest request line and header fields together."""

HEAD_SECONDS = 10.0
"""How long they may be awaited on a new connection, and how long they may take to arrive once they have begun."""

UNREAD_SECONDS = 10.0
"""How long a client may take nothing of what was written to it."""

MOST_PIPELINED = 4
"""Requests of a connection that wait for the one before them."""

MOST_CONNECTIONS = 10_000
FILES_KEPT_FREE = 64
"""Open files that connections leave to stores, figures and logs."""

MOST_SURPLUS = 16
"""Connections above the cap, for `/healthz` alone."""

GRACE_SECONDS = 10
"""How long requests under way may take to finish when the server stops."""

DRAIN_SECONDS = 1.0
"""How long a connection that is kept alive may still send a request then; the answer ends it."""

_HEAD_END = b"\r\n\r\n"
_HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"
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
        self._tell_started()

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:
            now = asyncio.get_running_loop().time()
            for connection in self._connections():
                connection.drop_if_stalled(now)
        return await super().on_tick(counter)

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
        return [one for one in self.server_state.connections if isinstance(one, BoundedProtocol)]


class ConnectionCap:
    """The connections of a server: how many there may be, and which of them wait for a request.

    Attributes:
        most: How many there may be.
        waiting: Those that wait, the longest first.
        leaving: Those that were cut and are still counted.
        is_draining: Whether every answer ends its connection.
    """

    def __init__(self) -> None:
        self.most = min(MOST_CONNECTIONS, max(1, _open_files() - FILES_KEPT_FREE))
        self.waiting: dict[BoundedProtocol, None] = {}
        self.leaving: set[BoundedProtocol] = set()
        self.is_draining = False

    @classmethod
    def of(cls, server_state: Any) -> ConnectionCap:
        """Return that of a server."""
        found: ConnectionCap | None = getattr(server_state, "connection_cap", None)
        if found is None:
            found = server_state.connection_cap = cls()
        return found


def _open_files() -> int:
    """Return how many files this process may have open, which is then as many as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + FILES_KEPT_FREE
    most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return wanted if soft == resource.RLIM_INFINITY else soft


class _HeldFlow(FlowControl):
    """Reading goes on only when what was read has been looked at."""

    is_held = False

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()


class BoundedProtocol(HttpToolsProtocol):
    """Uvicorn's HTTP/1.1, with bounds on what a client may send and leave unread."""

    flow: _HeldFlow
    _head_bytes = 0
    _piece_bytes = 0
    _begun = 0
    """How many heads have begun in the piece that is being read."""
    _is_in_head = False
    _is_head_too_large = False
    _awaited_since: float | None = None
    """Since when a head is awaited that is not there, or not completely; `None` if none is."""
    _rest = b""
    """What was read and has to wait until there is room in the pipe."""
    _running: RequestResponseCycle | None = None
    """The request that is being answered, or was last."""
    _unsent = 0
    _sent_at = 0.0
    """How much of what was written was not taken at the last look, and when some of it last was."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _HeldFlow(transport)
        self._awaited_since = self._sent_at = self.loop.time()
        self._cap = ConnectionCap.of(self.server_state)
        self._cap.waiting[self] = None
        surplus = len(self.connections) - len(self._cap.leaving) - self._cap.most
        if surplus <= 0:
            return
        surplus -= self._make_room(surplus)
        if surplus > MOST_SURPLUS:
            transport.write(_BUSY)
            transport.close()
        elif surplus > 0:
            self.app, self._usual_app = _busy, self.app

    _usual_app: Any = None
    """What answers otherwise, if this connection is surplus."""

    def _make_room(self, wanted: int) -> int:
        """Cut the connections that have been waiting for longest; return how many."""
        waiting = list(islice((one for one in self._cap.waiting if one is not self), wanted))
        for one in waiting:
            del self._cap.waiting[one]
            self._cap.leaving.add(one)
            one.transport.abort()
        return len(waiting)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cap.waiting.pop(self, None)
        self._cap.leaving.discard(self)
        self._rest = b""
        self.pipeline.clear()
        if self._running is not None:  # which is not uvicorn's `cycle` if others wait behind it
            self._running.disconnected = not self._running.response_complete
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read requests one by one, as far as there is room for them in the pipe."""
        if self._rest:
            self._rest += data
            return
        start = 0
        while True:
            end = data.find(_HEAD_END, start)
            if end < 0 or data.find(_HEAD_END, end + 4) < 0:
                self._read(data[start:] if start else data)
                return
            self._read(data[start : end + 4])
            start = end + 4
            if self.transport.is_closing():
                return
            if len(self.pipeline) >= MOST_PIPELINED:
                self._rest = data[start:]
                self.flow.pause_reading()
                self.flow.is_held = True
                return

    def _read(self, data: bytes) -> None:
        had_more = self._is_in_head or (self.cycle is not None and self.cycle.more_body)
        self._begun = 0
        self._piece_bytes = len(data)
        super().data_received(data)
        if self._awaited_since is None and self.cycle is not None and self.cycle.response_complete:
            # Neither a request nor uvicorn's own timer, which every byte ends: the unread rest of a body.
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
        if self._head_bytes + self._piece_bytes > HEAD_BYTES and self._head_size() > HEAD_BYTES:
            self._is_head_too_large = True
            raise _HeadTooLarge
        self._cap.waiting.pop(self, None)
        if self._usual_app is not None and self.url == b"/healthz":
            self.app = self._usual_app
        super().on_headers_complete()
        self.scope["extensions"][DIRECT] = Direct(self.cycle)  # type: ignore[assignment]
        if self._cap.is_draining:
            self.cycle.keep_alive = False

    def _head_size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        if self._is_head_too_large:
            self.transport.write(_HEAD_TOO_LARGE)
            self.transport.close()
        else:
            super().send_400_response(msg)

    def on_response_complete(self) -> None:
        rest, self._rest = self._rest, b""
        self.flow.is_held = False
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if rest:
            self.data_received(rest)
        if not self.pipeline and (self.cycle is None or self.cycle.response_complete):
            self._cap.waiting[self] = None

    def drain(self) -> None:
        """Let the next answer end the connection."""
        self._cap.is_draining = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False  # the last one in the pipe

    def drop_if_stalled(self, now: float) -> None:
        """Close the connection if a head is awaited for long, or cut it if nothing was taken for long."""
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent < self._unsent:
            self._sent_at = now
        self._unsent = unsent
        if now - self._sent_at > UNREAD_SECONDS:
            self.transport.abort()
        elif self._awaited_since is not None and now - self._awaited_since > HEAD_SECONDS:
            self.transport.close()


class Direct:
    """A request and its response without messages, where nothing has to be waited for; most requests are so."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def body(self) -> bytes | None:
        """Return the body of the request; `None` if it has not arrived completely."""
        return None if self._cycle.more_body else bytes(self._cycle.body)

    def reply(self, status: int, fields: tuple[Field, ...], body: bytes) -> bool:
        """Write the whole response; return false, having done nothing, if that is not simply possible."""
        cycle = self._cycle
        if (
            cycle.flow.write_paused
            or cycle.disconnected
            or not cycle.keep_alive
            or cycle.scope["method"] == "HEAD"
        ):
            return False
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        date = _encoded(tuple(cycle.default_headers))
        head = b"%b%b%bcontent-length: %d\r\n\r\n" % (STATUS_LINE[status], date, _encoded(fields), len(body))
        cycle.transport.write(head + body)
        cycle.message_event.set()
        cycle.on_response()
        return True


@lru_cache(maxsize=256)
def _encoded(fields: tuple[Field, ...]) -> bytes:
    return b"".join(b"%b: %b\r\n" % field for field in fields)


class _HeadTooLarge(Exception):
    """Ends the parsing of a request."""


async def _busy(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer that there is no room for this connection."""
    fields = [(b"content-length", b"0"), (b"connection", b"close"), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": 503, "headers": fields})
    await send({"type": "http.response.body", "body": b""})
