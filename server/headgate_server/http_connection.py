"""HTTP/1.1 for uvicorn's server, with bounds on what a client may send and leave unread.

A connection has a few requests in its pipe at most; one that takes nothing of what was written for long is cut. There is a
cap on connections. At the cap a new one takes the place of the one that has been waiting for a request for longest; if all
are busy, a few more are let in for `/healthz` alone, so that a server under load is not taken for dead.

It speaks ASGI, for our own application: that is called outside of any task (see `begin`), and by the `DIRECT` extension
takes a body that is there, and gives an answer that is complete, without messages (see `HttpExchange`).
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from http import HTTPStatus
from itertools import islice
from typing import Any
from urllib.parse import unquote

import httptools

from headgate_server.app import DIRECT, Message, Receive, Scope, Send
from headgate_server.begin import begin
from headgate_server.problems import Field

logger = logging.getLogger("headgate.server")

HEAD_BYTES = 32_768
"""The largest request line and header fields together."""

HEAD_SECONDS = 10.0
"""How long they may be awaited on a new connection, and how long they may take to arrive once they have begun."""

UNREAD_SECONDS = 10.0
"""How long a client may take nothing of what was written to it."""

LOOK_SECONDS = 1.0
"""How often connections are looked at for those that have stalled."""

MOST_PIPELINED = 4
"""Requests of a connection that wait for the one before them."""

MOST_AT_ONCE = 16
"""Requests of a connection that are read before other connections have their turn."""

MOST_UNFLUSHED = 32
"""Connections that have an answer for their clients before it is written to all of them."""

UNFLUSHED_BYTES = 65_536
"""How much of it a connection keeps at most until then."""

BODY_BYTES = 65_536
"""How much of a body is read before the application takes it."""

DISCARDED_BYTES = 16_777_216
"""How much of a body is read behind its answer, so that a client which sends before it reads gets that."""

MOST_CONNECTIONS = 10_000
FILES_KEPT_FREE = 64
"""Open files that connections leave to stores, figures and logs."""

MOST_SURPLUS = 16
"""Connections above the cap, for `/healthz` alone."""

LONGEST_CACHED = 128
"""Bytes of the longest target that is remembered as it was read."""

NO_CONTENT, NOT_MODIFIED = 204, 304
"""Statuses of answers without a body."""

_ASGI = {"version": "3.0", "spec_version": "2.3"}
_CLOSE: Field = (b"connection", b"close")
_HEAD_END = b"\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_MALFORMED = "Invalid HTTP request received."


class ConnectionCap:
    """The connections of a server: how many there may be, and which of them wait for a request.

    Attributes:
        most: How many there may be.
        waiting: Those that wait, the longest first.
        leaving: Those that were cut and are still counted.
        is_draining: Whether every answer ends its connection.
        dated: What uvicorn sends with every answer, and the same as bytes.
    """

    def __init__(self) -> None:
        self.most = min(MOST_CONNECTIONS, max(1, _open_files() - FILES_KEPT_FREE))
        self.waiting: dict[BoundedProtocol, None] = {}
        self.leaving: set[BoundedProtocol] = set()
        self.is_draining = False
        self.dated: tuple[list[Field] | None, bytes] = (None, b"")
        self._is_looking = False
        self._unflushed: list[BoundedProtocol] = []

    @classmethod
    def of(cls, server_state: Any) -> ConnectionCap:
        """Return that of a server."""
        found: ConnectionCap | None = getattr(server_state, "connection_cap", None)
        if found is None:
            found = server_state.connection_cap = cls()
        return found

    def look_after(self, connections: set[BoundedProtocol], loop: asyncio.AbstractEventLoop) -> None:
        """Drop those that have stalled, now and then, for as long as there are any."""
        if not self._is_looking:
            self._is_looking = True
            loop.call_later(LOOK_SECONDS, self._look, connections, loop)

    def flush_soon(self, connection: BoundedProtocol, loop: asyncio.AbstractEventLoop) -> None:
        """Write what a connection has for its client, one after the other with what others have.

        Between two answers there is time for the client to fall asleep, and to wake it takes as long as the answer.
        """
        if not self._unflushed:
            loop.call_soon(self._flush)
        self._unflushed.append(connection)
        if len(self._unflushed) >= MOST_UNFLUSHED:
            self._flush()

    def _flush(self) -> None:
        connections, self._unflushed = self._unflushed, []
        for connection in connections:
            connection.flush()

    def _look(self, connections: set[BoundedProtocol], loop: asyncio.AbstractEventLoop) -> None:
        self._is_looking = False
        now = loop.time()
        for connection in list(connections):
            connection.drop_if_stalled(now)
        if connections:
            self.look_after(connections, loop)


def _open_files() -> int:
    """Return how many files this process may have open, which is then as many as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + FILES_KEPT_FREE
    most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return wanted if soft == resource.RLIM_INFINITY else soft


class BoundedProtocol(asyncio.Protocol):
    """One connection; the arguments are those that uvicorn gives.

    Attributes:
        early: What the client had sent when the connection was accepted.
        pipeline: Requests that wait for the one before them, the next first.
        writable: What those that write wait for; `None` if they need not, because the client takes what was written.
    """

    # Read on every request; Python finds a slot at once, and the default of a class by a search.
    __slots__ = (
        "_app",
        "_awaited_since",
        "_begun",
        "_cap",
        "_client",
        "_discarded_bytes",
        "_framing_bytes",
        "_head_bytes",
        "_headers",
        "_hosts",
        "_idle_since",
        "_is_answering",
        "_is_ending",
        "_is_head_too_large",
        "_is_in_head",
        "_is_reading_paused",
        "_keep_alive_seconds",
        "_last_words",
        "_loop",
        "_parser",
        "_piece_bytes",
        "_reading",
        "_rest",
        "_running",
        "_sent_at",
        "_server",
        "_state",
        "_unflushed",
        "_unsent",
        "_url",
        "_usual_app",
        "early",
        "pipeline",
        "transport",
        "writable",
    )

    transport: asyncio.Transport

    def __init__(
        self,
        config: Any,
        server_state: Any,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if not config.loaded:
            config.load()
        self._app = config.loaded_app
        self._keep_alive_seconds = config.timeout_keep_alive
        self._loop = _loop or asyncio.get_running_loop()
        self._state = server_state
        self._cap = ConnectionCap.of(server_state)
        self._parser = httptools.HttpRequestParser(self)
        self.early = b""
        self.pipeline: deque[HttpExchange] = deque()
        self.writable: asyncio.Event | None = None
        self._url = b""
        self._headers: list[Field] = []
        self._hosts = 0
        """How many `Host` fields there are among them."""
        self._head_bytes = 0
        self._piece_bytes = 0
        self._begun = 0
        """How many heads have begun in the piece that is being read."""
        self._is_in_head = False
        self._is_head_too_large = False
        self._awaited_since: float | None = None
        """Since when a head is awaited that is not there, or not completely; `None` if none is."""
        self._idle_since: float | None = None
        """Since when the last request is answered, if there is no other."""
        self._rest = b""
        """What was read and has to wait until there is room in the pipe."""
        self._last_words = b""
        """The answer to what is no request, for when those before it are answered; nothing behind it is read."""
        self._framing_bytes = 0
        """What was read of a body since there was last a part of it: sizes of chunks with their extensions, and trailers."""
        self._reading: HttpExchange | None = None
        """The newest request, whose body may still arrive."""
        self._running: HttpExchange | None = None
        """The request that is being answered, or was last."""
        self._is_answering = False
        self._is_ending = False
        self._discarded_bytes = 0
        """Whether only the rest of a body is awaited behind the last answer, and how much of it has come."""
        self._is_reading_paused = False
        self._unflushed = b""
        """What is written before the event loop waits again."""
        self._unsent = 0
        self._sent_at = 0.0
        """How much of what was written was not taken at the last look, and when some of it last was."""
        self._usual_app: Any = None
        """What answers otherwise, if this connection is surplus."""

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._server, self._client = _address(transport, "sockname"), _address(transport, "peername")
        self._awaited_since = self._sent_at = self._loop.time()
        self._state.connections.add(self)
        self._cap.waiting[self] = None
        self._cap.look_after(self._state.connections, self._loop)
        surplus = len(self._state.connections) - len(self._cap.leaving) - self._cap.most
        if surplus > 0:
            surplus -= self._make_room(surplus)
        if surplus > MOST_SURPLUS:
            self._end_with(503, ((b"retry-after", b"1"),))
            return
        if surplus > 0:
            self._app, self._usual_app = _busy, self._app
        if self.early:
            early, self.early = self.early, b""
            self.data_received(early)

    def _make_room(self, wanted: int) -> int:
        """Cut the connections that have been waiting for longest; return how many."""
        waiting = list(islice((one for one in self._cap.waiting if one is not self), wanted))
        for one in waiting:
            del self._cap.waiting[one]
            self._cap.leaving.add(one)
            one.close()  # behind an answer of this turn, which is written before the next
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

    def write(self, data: bytes) -> None:
        """Write to the client, soon."""
        is_first = not self._unflushed
        self._unflushed += data
        if len(self._unflushed) > UNFLUSHED_BYTES:
            self.flush()
        elif is_first:
            self._cap.flush_soon(self, self._loop)

    def flush(self) -> None:
        """Write now what is to be written."""
        data, self._unflushed = self._unflushed, b""
        if data and not self.transport.is_closing():
            self.transport.write(data)

    def close(self) -> None:
        """Close the connection behind what is to be written."""
        self.flush()
        self.transport.close()

    def pause_writing(self) -> None:
        self.writable = asyncio.Event()

    def resume_writing(self) -> None:
        writable, self.writable = self.writable, None
        if writable is not None:
            writable.set()

    def _pause_reading(self) -> None:
        """Read no more; also if that was said before: uvloop reads from every connection after `connection_made`."""
        self._is_reading_paused = True
        self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on, if what was read has been looked at."""
        if self._is_reading_paused and not self._rest and not self._last_words:
            self._is_reading_paused = False
            self.transport.resume_reading()

    def eof_received(self) -> bool:
        """Answer what a client has asked that sends no more; otherwise the connection ends."""
        if self._rest:
            return True  # what came before the end has to wait; the end is read again behind it
        if self.pipeline and self.pipeline[-1].has_more:
            self.pipeline.pop()  # the newest will never be complete; those before it are
            self._reading = self.pipeline[-1] if self.pipeline else self._running
        newest = self._reading
        if newest is None or newest.is_complete or newest.has_more:
            self.flush()
            return False
        newest.keep_alive = False
        return True

    def shutdown(self) -> None:
        """Close the connection, or let the answer that is under way end it; uvicorn calls this when it stops."""
        if self._reading is None or self._reading.is_complete:
            self.close()
        else:
            self._reading.keep_alive = False

    def drain(self) -> None:
        """Let the answer that is under way end the connection."""
        if self._reading is not None and not self._reading.is_complete:
            self._reading.keep_alive = False  # the last one in the pipe

    def drop_if_stalled(self, now: float) -> None:
        """Close the connection if nothing is awaited on it for long, or cut it if nothing was taken for long."""
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

    # Requests

    def data_received(self, data: bytes) -> None:
        """Read requests one by one, and answer each at once; if one has to wait, as far as there is room in the pipe."""
        if self._rest or self._last_words:
            self._rest += data
            self._pause_reading()
            return
        start = 0
        for _ in range(MOST_AT_ONCE):
            end = data.find(_HEAD_END, start)
            if end < 0 or data.find(_HEAD_END, end + 4) < 0:
                self._read(data[start:] if start else data)
                self._answer_waiting()
                return
            self._read(data[start : end + 4])
            self._answer_waiting()
            start = end + 4
            if self._last_words or self.transport.is_closing():
                return
            if len(self.pipeline) >= MOST_PIPELINED:
                break
        else:
            self._loop.call_soon(self._read_rest)
        self._rest = data[start:]
        self._pause_reading()

    def _read_rest(self) -> None:
        """Go on with what was read, if there is room for it in the pipe."""
        if len(self.pipeline) >= MOST_PIPELINED or self._last_words or self.transport.is_closing():
            return
        rest, self._rest = self._rest, b""
        self.resume_reading()
        if rest:
            self.data_received(rest)
        self._note_idle()

    def _read(self, data: bytes) -> None:
        had_more = self._is_in_head or (self._reading is not None and self._reading.has_more)
        self._begun = 0
        self._piece_bytes = len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._read_without_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError:
            self._refuse()
            return
        if self._awaited_since is None and self._reading is not None and self._reading.is_complete:
            self._awaited_since = self._loop.time()  # the unread rest of a body
        # Where a head begins behind another request, what came with it is mostly not its own.
        if self._is_in_head and self._begun + had_more <= 1:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
                self._end_with(431)
        elif had_more and self._reading is not None and self._reading.has_more:
            self._framing_bytes += len(data)
            if self._framing_bytes > HEAD_BYTES:
                self._end_with(431)

    def _read_without_upgrade(self, rest: bytes) -> None:
        """Read a request again that asks for another protocol, without that: its body would not be read otherwise."""
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        if method == b"CONNECT":
            self._refuse()
            return
        fields = tuple(field for field in self._headers if field[0] != b"upgrade")
        self._parser = httptools.HttpRequestParser(self)
        self._read(b"%b %b HTTP/%b\r\n%b\r\n%b" % (method, self._url, version, _encoded(fields), rest))

    def _refuse(self) -> None:
        if self._reading is not None and not self._reading.keep_alive and not self._reading.has_more:
            return  # what comes behind the last request
        if self._is_head_too_large:
            self._end_with(431)
        else:
            client = (self._client or ("an unknown address",))[0]
            logger.warning("%s has sent what is no HTTP request; TLS perhaps, or another protocol", client)
            self._end_with(400, ((b"content-type", b"text/plain; charset=utf-8"),), _MALFORMED.encode())

    def _end_with(self, status: int, fields: tuple[Field, ...] = (), body: bytes = b"") -> None:
        """Answer what is no request for the application, in its turn, and close the connection."""
        head = _encoded_head(status, (*fields, _CLOSE, (b"content-length", b"%d" % len(body))))
        self._last_words = b"%b\r\n%b" % (head, body)
        newest = self._reading
        if newest is not None and newest.has_more:  # it is its body that cannot be read
            if newest.is_started:
                self._last_words = b""
            elif newest in self.pipeline:
                self.pipeline.remove(newest)
            newest.lose()
        if self.pipeline or not (self._running is None or self._running.is_over):
            self._pause_reading()
        else:
            self._say_last_words()

    def _say_last_words(self) -> None:
        if self._last_words:
            self.write(self._last_words)
        self.close()

    def on_message_begin(self) -> None:
        """Begin a head; this and what follows is called by the parser."""
        self._url = b""
        self._headers = []
        self._hosts = 0
        self._head_bytes = 0
        self._begun += 1
        self._is_in_head = True
        self._idle_since = None
        self._awaited_since = self._loop.time()

    def on_url(self, url: bytes) -> None:
        """Take a part of the request's target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header field; what is behind a body is none, since it could not have been looked at before it."""
        if self._is_in_head:
            name = name.lower()
            self._headers.append((name, value))
            if name == b"host":
                self._hosts += 1

    def on_headers_complete(self) -> None:
        """Make a request of the head, and have it answered when it is its turn."""
        self._is_in_head = False
        self._awaited_since = None
        if self._parser.should_upgrade():
            return  # it is read again without that
        if self._reading is not None and not self._reading.keep_alive:
            raise _EndOfParsing  # its answer ends the connection
        if self._head_bytes + self._piece_bytes > HEAD_BYTES and self._head_size() > HEAD_BYTES:
            self._is_head_too_large = True
            raise _EndOfParsing
        version = self._parser.get_http_version()
        if self._hosts > 1 or (self._hosts == 0 and version != "1.0"):
            raise _EndOfParsing  # a request says for whom it is, once (RFC 9112, section 3.2)
        self._cap.waiting.pop(self, None)
        if self._usual_app is not None and self._url == b"/healthz":
            self._app = self._usual_app
        keep_alive = version != "1.0" and not self._cap.is_draining and self._parser.should_keep_alive()
        self._framing_bytes = -self._piece_bytes
        before, self._reading = self._reading, HttpExchange(self, self._scope(version), keep_alive)
        self.pipeline.append(self._reading)
        if before is not None and not before.is_complete:
            self._pause_reading()

    def _head_size(self) -> int:
        return len(self._url) + sum(len(name) + len(value) + 4 for name, value in self._headers)

    def _scope(self, http_version: str) -> Scope:
        url = self._url
        path, raw_path, query = _cached_target(url) if len(url) <= LONGEST_CACHED else _target(url)
        return {
            "type": "http",
            "asgi": _ASGI,
            "http_version": http_version,
            "method": self._parser.get_method().decode("ascii"),
            "scheme": "http",
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            "root_path": "",
            "headers": self._headers,
            "server": self._server,
            "client": self._client,
        }

    def on_body(self, body: bytes) -> None:
        """Take a part of the newest request's body."""
        self._framing_bytes = -self._piece_bytes
        if self._reading is not None and not self._reading.is_complete:
            self._reading.feed(body)
            if len(self._reading.body) > BODY_BYTES:
                self._pause_reading()
        elif self._is_ending:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > DISCARDED_BYTES:
                self.transport.abort()

    def on_message_complete(self) -> None:
        """End the newest request's body."""
        if self._reading is None or self._parser.should_upgrade():
            return
        self._reading.has_more = False
        if not self._reading.is_complete:
            self._reading.notify()
        elif self._is_ending:
            self.close()

    # Answers

    def _answer_waiting(self) -> None:
        """Answer what is in the pipe, at once as far as nothing has to be waited for."""
        if self.pipeline and not self._is_answering:
            begin(self._answer_all(), self._loop, self._state.tasks)

    async def _answer_all(self) -> None:
        self._is_answering = True
        try:
            while self.pipeline:
                exchange = self._running = self.pipeline.popleft()
                try:
                    await self._app(exchange.scope, exchange.receive, exchange.send)
                except Exception:  # whatever it is, only this connection ends
                    logger.exception("a request failed")
                finally:
                    del exchange.scope["extensions"]  # which would be a cycle
                    if not exchange.is_complete:
                        self.close()
        finally:
            self._is_answering = False

    def date(self) -> bytes:
        """Return the field that uvicorn sends with every answer; it makes a new list of it once a second."""
        fields = self._state.default_headers
        if fields is not self._cap.dated[0]:
            self._cap.dated = fields, _encoded(tuple(fields))
        return self._cap.dated[1]

    async def until_writable(self) -> None:
        """Wait until the client has taken enough of what was written."""
        while self.writable is not None:
            await self.writable.wait()

    def completed(self, exchange: HttpExchange) -> None:
        """Go on with the next request."""
        self._state.total_requests += 1
        if not exchange.keep_alive:
            self._close_behind(exchange)
            return
        if self._last_words and not self.pipeline:
            self._say_last_words()
        if self._last_words or self.transport.is_closing():
            return
        if self._rest:
            self._loop.call_soon(self._read_rest)
        self.resume_reading()
        self._note_idle()

    def _note_idle(self) -> None:
        """Take note that the next request is awaited, if all that was sent is answered."""
        if not self._rest and (self._reading is None or self._reading.is_complete):
            self._idle_since = self._loop.time()
            self._cap.waiting[self] = None

    def _close_behind(self, exchange: HttpExchange) -> None:
        """Close the connection; if the client still sends a body, when it has: a reset would take the answer from it."""
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


class HttpExchange:
    """A request and the answer to it.

    Attributes:
        scope: The request, as ASGI has it.
        keep_alive: Whether the connection outlives it.
        has_more: Whether a part of the body has not arrived.
        body: What has arrived of it and was not taken.
        is_started: Whether a part of the answer was written.
        is_complete: Whether all of it was.
    """

    def __init__(self, connection: BoundedProtocol, scope: Scope, keep_alive: bool) -> None:
        scope["extensions"] = {DIRECT: self}
        self.scope = scope
        self.keep_alive = keep_alive
        self.body: bytes | bytearray = b""
        self.has_more = True
        self.is_started = self.is_complete = False
        self._connection = connection
        self._is_chunked = self._is_gone = self._has_news = self._has_continued = False
        self._news: asyncio.Event | None = None

    def feed(self, body: bytes) -> None:
        """Take a part of the body."""
        if not self.body:
            self.body = body
        elif isinstance(self.body, bytearray):
            self.body += body
        else:
            self.body = bytearray(self.body) + body
        self.notify()

    @property
    def is_over(self) -> bool:
        """Whether nothing more is written."""
        return self.is_complete or self._is_gone

    def notify(self) -> None:
        """Wake the one that waits for the body, or for the end."""
        self._has_news = True
        if self._news is not None:
            self._news.set()

    def lose(self) -> None:
        """There is no one to answer any longer."""
        self._is_gone = not self.is_complete
        self.notify()

    # In ASGI's messages

    async def receive(self) -> Message:
        """Return the next part of the body; after it, that the client is gone, or the answer complete."""
        if self._awaits_continue() and not self.is_started:
            self._has_continued = True
            self._connection.write(_CONTINUE)
        while not (self._has_news or self._is_gone or self.is_complete):
            self._connection.resume_reading()
            self._news = self._news or asyncio.Event()
            self._news.clear()
            await self._news.wait()
        if self._is_gone or self.is_complete:
            return {"type": "http.disconnect"}
        self._has_news = False
        body, self.body = self.body, b""
        return {"type": "http.request", "body": bytes(body), "more_body": self.has_more}

    def _awaits_continue(self) -> bool:
        """Return whether the client sends the body only if it is asked to."""
        return (
            self.has_more
            and not (self._has_continued or self.body)
            and self.scope["http_version"] != "1.0"
            and any(
                name == b"expect" and value.lower() == b"100-continue"
                for name, value in self.scope["headers"]
            )
        )

    async def send(self, message: Message) -> None:
        """Write a part of the answer, once the client has taken enough of what came before."""
        await self._connection.until_writable()
        if self._is_gone:
            return
        if message["type"] == "http.response.start":
            self._start(message["status"], tuple(message["headers"]))
        else:
            self._continue(message.get("body", b""), more=message.get("more_body", False))

    def _start(self, status: int, fields: tuple[Field, ...]) -> None:
        self.is_started = True
        fields = self._with_close(fields)
        is_sized = any(name == b"content-length" for name, _ in fields)
        if not is_sized and status not in (NO_CONTENT, NOT_MODIFIED) and self.scope["http_version"] != "1.0":
            fields = (*fields, (b"transfer-encoding", b"chunked"))
            self._is_chunked = self.scope["method"] != "HEAD"
        head = b"%b%b\r\n" % (_encoded_head(status, fields), self._connection.date())
        self._connection.write(head)

    def _with_close(self, fields: tuple[Field, ...]) -> tuple[Field, ...]:
        """Add that the connection ends, if it does; whether a body follows that was not asked for cannot be known."""
        if _CLOSE in fields:
            self.keep_alive = False
            return fields
        if self.has_more and self._awaits_continue():
            self.keep_alive = False
        return fields if self.keep_alive else (*fields, _CLOSE)

    def _continue(self, body: bytes, *, more: bool) -> None:
        if self._is_chunked:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            body = body if more else body + b"0\r\n\r\n"
        if body and self.scope["method"] != "HEAD":
            self._connection.write(body)
        if not more:
            self._complete()

    # Without messages, where nothing has to be waited for; most requests are so.

    def whole_body(self) -> bytes | None:
        """Return the body; `None` if it has not arrived completely."""
        return None if self.has_more else bytes(self.body)

    def reply(self, status: int, fields: tuple[Field, ...], body: bytes) -> bool:
        """Write the whole answer; return false, having done nothing, if that has to be waited for."""
        connection = self._connection
        if self._is_gone or connection.writable is not None:
            return False
        head = _encoded_head(status, self._with_close(fields)) + connection.date()
        if self.scope["method"] == "HEAD":
            written = b"%bcontent-length: %d\r\n\r\n" % (head, len(body))
        elif status == NOT_MODIFIED:
            written = head + b"\r\n"
        else:
            written = b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)
        connection.write(written)
        self._complete()
        return True

    def abort(self) -> None:
        """Cut the connection, although what was written has not been taken."""
        self._connection.transport.abort()

    def _complete(self) -> None:
        self.is_started = self.is_complete = True
        self.notify()
        self._connection.completed(self)


@lru_cache(maxsize=256)
def _encoded_head(status: int, fields: tuple[Field, ...]) -> bytes:
    return b"HTTP/1.1 %d %b\r\n%b" % (status, HTTPStatus(status).phrase.encode(), _encoded(fields))


@lru_cache(maxsize=256)
def _encoded(fields: Iterable[Field]) -> bytes:
    encoded = b"".join(b"%b: %b\r\n" % field for field in fields)
    if encoded.count(b"\n") != len(tuple(fields)) or encoded.count(b"\r") != len(tuple(fields)):
        raise ValueError("a header field must not contain an end of line")
    return encoded


def _target(url: bytes) -> tuple[str, bytes, bytes]:
    """Return the path of a request's target as text, as it was sent, and the query behind it."""
    if url.startswith(b"/") and b"#" not in url:
        path, _, query = url.partition(b"?")
    else:
        parsed = httptools.parse_url(url)
        path, query = parsed.path or b"/", parsed.query or b""
    text = path.decode("ascii")
    return unquote(text) if "%" in text else text, path, query


_cached_target = lru_cache(maxsize=256)(_target)


def _address(transport: asyncio.Transport, name: str) -> tuple[str, int | None] | None:
    """Return an address as ASGI has it; that of a Unix socket is its path."""
    address = transport.get_extra_info(name)
    if isinstance(address, (tuple, list)):
        return str(address[0]), int(address[1])
    return (str(address), None) if address else None


class _EndOfParsing(Exception):
    """What has come is no request for the application."""


async def _busy(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer that there is no room for this connection."""
    fields = [(b"content-length", b"0"), _CLOSE, (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": 503, "headers": fields})
    await send({"type": "http.response.body", "body": b""})
