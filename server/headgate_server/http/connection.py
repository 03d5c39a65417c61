"""One HTTP/1.1 connection under uvicorn's server, with bounds on requests and unread responses."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from itertools import islice
from typing import Any

from headgate_server.app import Receive, Scope, Send
from headgate_server.http.encoding import CLOSE, encoded_head
from headgate_server.http.exchange import HttpExchange
from headgate_server.http.output import OutputProtocol
from headgate_server.http.parser import RequestParser
from headgate_server.http.taskless import run_without_task
from headgate_server.problems import Field

logger = logging.getLogger("headgate.server")

HEAD_SECONDS = 10.0
"""Seconds until the first head on a new connection, and for any head to arrive once it has begun."""

UNREAD_SECONDS = 10.0
"""Seconds after which a client that does not read is cut."""

MAX_PIPELINED = 4
"""Requests of a connection that wait for earlier responses."""

MAX_AT_ONCE = 16
"""Requests of a connection that are parsed before other connections are served."""

BODY_BYTES = 65_536
"""Bytes of a body that are read before the application receives them."""

DISCARDED_BYTES = 16_777_216
"""Bytes of a body that are read after its response, so that a client which sends before it reads gets the response."""

MAX_SURPLUS = 16
"""Connections above the cap, for `/healthz` only."""

_HEAD_END = b"\r\n\r\n"


class BoundedProtocol(OutputProtocol):
    """One connection; uvicorn passes the arguments.

    Attributes:
        early: Input that the client had sent when the connection was accepted.
        pipeline: Requests that wait for earlier responses, the next first.
        newest: The newest request, whose body may still arrive; `None` before the first.
        client: The client's address, as in ASGI.
        server: The server's address, as in ASGI.
    """

    # Read on every request; a slot is found faster than the default of a class.
    __slots__ = (
        "_app",
        "_awaited_since",
        "_discarded_bytes",
        "_idle_since",
        "_is_answering",
        "_is_ending",
        "_is_reading_paused",
        "_keep_alive_seconds",
        "_last_response",
        "_parser",
        "_rest",
        "_running",
        "_sent_at",
        "_unsent",
        "_usual_app",
        "client",
        "early",
        "newest",
        "pipeline",
        "server",
    )

    def __init__(
        self,
        config: Any,
        server_state: Any,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if not config.loaded:
            config.load()
        super().__init__(server_state, _loop or asyncio.get_running_loop())
        self._app = config.loaded_app
        self._keep_alive_seconds = config.timeout_keep_alive
        self._parser = RequestParser(self)
        self.early = b""
        self.pipeline: deque[HttpExchange] = deque()
        self.newest: HttpExchange | None = None
        self._awaited_since: float | None = None
        """Start of the wait for an incomplete head; `None` if no head is awaited."""
        self._idle_since: float | None = None
        """Time of the last response, if no request is waiting."""
        self._rest = b""
        """Input to parse when there is room in the pipeline."""
        self._last_response = b""
        """The response to invalid input, written after the responses before it; no input after it is parsed."""
        self._running: HttpExchange | None = None
        """The request that is being answered, or was answered last."""
        self._is_answering = False
        self._is_ending = False
        """Whether the connection waits only for the rest of a body, after the last response."""
        self._discarded_bytes = 0
        self._is_reading_paused = False
        self._unsent = 0
        """Bytes in the write buffer at the last check."""
        self._sent_at = 0.0
        """Time at which the client last read data."""
        self._usual_app: Any = None
        """The application, if this connection is above the cap."""

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.server, self.client = _address(transport, "sockname"), _address(transport, "peername")
        self._awaited_since = self._sent_at = self._loop.time()
        self._state.connections.add(self)
        self._cap.waiting[self] = None
        self._cap.schedule_check(self._state.connections, self._loop)
        surplus = len(self._state.connections) - len(self._cap.leaving) - self._cap.limit
        if surplus > 0:
            surplus -= self._make_room(surplus)
        if surplus > MAX_SURPLUS:
            self.end_with(503, ((b"retry-after", b"1"),))
            return
        if surplus > 0:
            self._app, self._usual_app = _busy, self._app
        if self.early:
            early, self.early = self.early, b""
            self.data_received(early)

    def _make_room(self, number: int) -> int:
        """Cut the connections that have waited longest for a request; return how many."""
        waiting = list(islice((one for one in self._cap.waiting if one is not self), number))
        for one in waiting:
            del self._cap.waiting[one]
            self._cap.leaving.add(one)
            one.close()  # writes a pending response first
            self._loop.call_soon(one.transport.abort)
        return len(waiting)

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)
        self._cap.waiting.pop(self, None)
        self._cap.leaving.discard(self)
        self._rest = self._unflushed = b""
        self.pipeline.clear()
        if self._running is not None:
            self._running.lose()
        self.resume_writing()

    def eof_received(self) -> bool:
        """Answer the requests of a client that sends no more; without requests, close the connection."""
        if self._rest:
            return True  # earlier input waits; the end is read again after it
        if self.pipeline and self.pipeline[-1].has_more:
            self.pipeline.pop()  # the newest request will never be complete; earlier ones are
            self.newest = self.pipeline[-1] if self.pipeline else self._running
        newest = self.newest
        if newest is None or newest.is_complete or newest.has_more:
            self.flush()
            return False
        newest.keep_alive = False
        return True

    def shutdown(self) -> None:
        """Close the connection after the response in progress; uvicorn calls this when it stops."""
        if self.newest is None or self.newest.is_complete:
            self.close()
        else:
            self.newest.keep_alive = False

    def drain(self) -> None:
        """Close the connection after the response in progress, if there is one."""
        if self.newest is not None and not self.newest.is_complete:
            self.newest.keep_alive = False

    def drop_if_stalled(self, now: float) -> None:
        """Close the connection if a request is overdue; cut it if the client reads nothing."""
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent < self._unsent:
            self._sent_at = now
        self._unsent = unsent
        if now - self._sent_at > UNREAD_SECONDS:
            self.transport.abort()
        elif (self._awaited_since is not None and now - self._awaited_since > HEAD_SECONDS) or (
            self._idle_since is not None and now - self._idle_since > self._keep_alive_seconds
        ):
            self.close()

    # Input

    def data_received(self, data: bytes) -> None:
        """Parse requests one by one and answer each at once, as far as there is room in the pipeline."""
        if self._rest or self._last_response:
            self._rest += data
            self._pause_reading()
            return
        start = 0
        for _ in range(MAX_AT_ONCE):
            end = data.find(_HEAD_END, start)
            if end < 0 or data.find(_HEAD_END, end + 4) < 0:
                self._parser.feed(data[start:] if start else data)
                self._answer_waiting()
                return
            self._parser.feed(data[start : end + 4])
            self._answer_waiting()
            start = end + 4
            if self._last_response or self.transport.is_closing():
                return
            if len(self.pipeline) >= MAX_PIPELINED:
                break
        else:
            self._loop.call_soon(self._parse_rest)
        self._rest = data[start:]
        self._pause_reading()

    def _parse_rest(self) -> None:
        """Parse waiting input, if there is room in the pipeline."""
        if len(self.pipeline) >= MAX_PIPELINED or self._last_response or self.transport.is_closing():
            return
        rest, self._rest = self._rest, b""
        self.resume_reading()
        if rest:
            self.data_received(rest)
        self._wait_if_idle()

    def _pause_reading(self) -> None:
        """Stop reading; repeated calls matter, because uvloop reads from every connection after `connection_made`."""
        self._is_reading_paused = True
        self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on, unless earlier input waits."""
        if self._is_reading_paused and not self._rest and not self._last_response:
            self._is_reading_paused = False
            self.transport.resume_reading()

    # Called by the parser

    def begin_head(self) -> None:
        """Start the time for a head."""
        self._idle_since = None
        self._awaited_since = self._loop.time()

    def end_head(self) -> None:
        """Stop the time for a head."""
        self._awaited_since = None

    def check_unread_body(self) -> None:
        """Start the time for the rest of a body whose request was answered."""
        if self._awaited_since is None and self.newest is not None and self.newest.is_complete:
            self._awaited_since = self._loop.time()

    def add_request(self, scope: Scope, keep_alive: bool) -> None:
        """Add a request to the pipeline."""
        self._cap.waiting.pop(self, None)
        if self._usual_app is not None and scope["raw_path"] == b"/healthz":
            self._app = self._usual_app
        before = self.newest
        self.newest = HttpExchange(self, scope, keep_alive and not self._cap.is_draining)
        self.pipeline.append(self.newest)
        if before is not None and not before.is_complete:
            self._pause_reading()

    def add_body(self, body: bytes) -> None:
        """Add a part of the newest request's body, or discard it if the request was answered."""
        if self.newest is not None and not self.newest.is_complete:
            self.newest.feed(body)
            if len(self.newest.body) > BODY_BYTES:
                self._pause_reading()
        elif self._is_ending:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > DISCARDED_BYTES:
                self.transport.abort()

    def end_body(self) -> None:
        """End the newest request's body."""
        if self.newest is None:
            return
        self.newest.has_more = False
        if not self.newest.is_complete:
            self.newest.notify()
        elif self._is_ending:
            self.close()

    def end_with(self, status: int, fields: tuple[Field, ...] = (), body: bytes = b"") -> None:
        """Answer invalid input after the requests before it, and close the connection."""
        head = encoded_head(status, (*fields, CLOSE, (b"content-length", b"%d" % len(body))))
        self._last_response = b"%b\r\n%b" % (head, body)
        newest = self.newest
        if newest is not None and newest.has_more:  # its body is invalid
            if newest.is_started:
                self._last_response = b""
            elif newest in self.pipeline:
                self.pipeline.remove(newest)
            newest.lose()
        if self.pipeline or not (self._running is None or self._running.is_over):
            self._pause_reading()
        else:
            self._write_last_response()

    def _write_last_response(self) -> None:
        if self._last_response:
            self.write(self._last_response)
        self.close()

    # Responses

    def _answer_waiting(self) -> None:
        """Answer the requests in the pipeline, immediately unless one has to wait."""
        if self.pipeline and not self._is_answering:
            run_without_task(self._answer_all(), self._loop, self._state.tasks)

    async def _answer_all(self) -> None:
        self._is_answering = True
        try:
            while self.pipeline:
                exchange = self._running = self.pipeline.popleft()
                try:
                    await self._app(exchange.scope, exchange.receive, exchange.send)
                except Exception:  # any error ends only this connection
                    logger.exception("a request failed")
                finally:
                    del exchange.scope["extensions"]  # a reference cycle
                    if not exchange.is_complete:
                        self.close()
        finally:
            self._is_answering = False

    def completed(self, exchange: HttpExchange) -> None:
        """Continue with the next request."""
        self._state.total_requests += 1
        if not exchange.keep_alive:
            self._close_after(exchange)
            return
        if self._last_response and not self.pipeline:
            self._write_last_response()
        if self._last_response or self.transport.is_closing():
            return
        if self._rest:
            self._loop.call_soon(self._parse_rest)
        self.resume_reading()
        self._wait_if_idle()

    def _wait_if_idle(self) -> None:
        """Wait for the next request, if all requests are answered."""
        if not self._rest and (self.newest is None or self.newest.is_complete):
            self._idle_since = self._loop.time()
            self._cap.waiting[self] = None

    def _close_after(self, exchange: HttpExchange) -> None:
        """Close the connection, but only after the rest of a body, because a reset would drop the response."""
        self.pipeline.clear()
        if exchange.has_more and not self.transport.is_closing():
            self._is_ending = True
            self._awaited_since = self._loop.time()
            self._cap.waiting[self] = None
            self.flush()
            self.transport.write_eof()
            self.resume_reading()
        else:
            self.close()


def _address(transport: asyncio.Transport, name: str) -> tuple[str, int | None] | None:
    """Return an address as in ASGI; for a Unix socket, its path."""
    address = transport.get_extra_info(name)
    if isinstance(address, (tuple, list)):
        return str(address[0]), int(address[1])
    return (str(address), None) if address else None


async def _busy(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer on a connection above the cap."""
    fields = [(b"content-length", b"0"), CLOSE, (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": 503, "headers": fields})
    await send({"type": "http.response.body", "body": b""})
