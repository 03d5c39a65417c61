"""Connections in memory: bytes that arrive later, in pieces, only up to a point, or never.

A `Link` is what lies below a connection. Above it are the three kinds of connections that stores use: an asyncio transport
(redis-py), a stream of httpcore (the client of our server), and a connection of libpq (psycopg).
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpcore
from psycopg import OperationalError
from psycopg.pq import ConnStatus, DiagnosticField, ExecStatus

from tests.simulation.loop import Process, SimulatedLoop


class Network:
    """All connections to one server.

    Attributes:
        faults: Start and end of each fault, by the server's clock in microseconds, and its kind; the end may change.
        unread: How many replies had arrived when their connection was closed, and were not read.
        links: The open connections.
        injected: How many faults there were, by kind.
    """

    def __init__(self, loop: SimulatedLoop, server: Any) -> None:
        self.loop = loop
        self.rng = loop.rng
        self.server = server
        self.links: list[Link] = []
        self.faults: list[list[Any]] = []
        self.injected: dict[str, int] = {}
        self.unread = 0
        loop.connect = self.open_stream

    def count(self, kind: str) -> None:
        """Count a fault that no call may fail for."""
        self.injected[kind] = self.injected.get(kind, 0) + 1

    def fault(self, kind: str, seconds: float) -> list[Any]:
        """Count a fault of this duration."""
        self.count(kind)
        now = self.server.now_us()
        span = [now, now + round(seconds * 1e6), kind]
        self.faults.append(span)
        return span

    def latency(self) -> float:
        """Return how long a message takes."""
        choice = self.rng.random()
        return 5e-5 + (self.rng.random() ** 3) * (2e-4 if choice < 0.9 else 0.01)

    async def open(self) -> Link:
        """Connect the running process."""
        opened = self.loop.create_future()
        process = self.loop.current()

        def arrive() -> None:
            if not opened.done():
                process.context.run(opened.set_result, self.server.is_up)

        self.loop.at(max(self.loop.time(), self.server.silent_until) + self.latency(), arrive)
        if not await opened:
            raise ConnectionRefusedError(111, "Connect call failed")
        link = Link(self, process)
        self.links.append(link)
        return link

    async def open_stream(self, factory: Callable[[], Any], *_: Any) -> tuple[Any, Any]:
        """Connect an asyncio protocol, as `create_connection` does."""
        link = await self.open()
        protocol = factory()
        transport = SimulatedTransport(link, protocol)
        protocol.connection_made(transport)
        return transport, protocol


class Link:
    """One connection.

    Attributes:
        process: The process that opened it.
        inbox: Bytes that arrived at the client and are unread.
        is_over: Whether the end has arrived there.
        is_closed: Whether the client has closed it.
        reader: Called in a turn of the process while there is something to read.
        left: How many bytes still pass to the server and to the client; `None` for any number.
        is_dark: Whether nothing passes any more, without a word.
    """

    def __init__(self, network: Network, process: Process) -> None:
        self.network = network
        self.process = process
        self.inbox = bytearray()
        self.is_over = self.is_closed = self.is_dark = False
        self.reader: Callable[[], None] | None = None
        self.left: dict[str, int | None] = {"server": None, "client": None}
        self.open_fault: list[Any] | None = None
        self._last = {"server": 0.0, "client": 0.0}
        self._is_broken = False
        self._stalled: deque[bytes] = deque()
        self.session: Any = network.server.session(self)

    def send(self, to: str, data: bytes) -> None:
        """Send bytes to the `server` or to the `client`; they arrive later, and in any number of pieces."""
        if self._is_broken or (to == "server" and self.is_closed):
            return
        loop, rng, left = self.network.loop, self.network.rng, self.left[to]
        if self.is_dark:
            return
        if left is not None:
            data, self.left[to] = data[:left], max(0, left - len(data))
        while data:
            size = rng.randrange(1, len(data) + 1) if rng.random() < 0.1 else len(data)
            piece, data = data[:size], data[size:]
            at = self._last[to] = max(self._last[to] + 1e-9, loop.time() + self.network.latency())
            loop.at(at, partial(self._arrive, to, piece))
        if left is not None and not self.left[to]:
            self.break_off()

    def delay(self, to: str, seconds: float) -> None:
        """Delay everything sent from now on."""
        self._last[to] = max(self._last[to], self.network.loop.time() + seconds)

    def break_off(self) -> None:
        """End the connection; both sides notice it after the data in flight."""
        if not self._is_broken:
            self._is_broken = True
            loop = self.network.loop
            for to in self._last:
                at = max(self._last[to], loop.time()) + self.network.latency()
                loop.at(at, partial(self._arrive, to, None))

    def _arrive(self, to: str, data: bytes | None) -> None:
        server = self.network.server
        if to == "server":
            if not server.is_up:
                self.session.is_over = True
                self.break_off()
            if data is not None:
                self._stalled.append(data)
                self._pass_on()
            return
        if self.is_closed:
            return
        if data is None:
            self.is_over = True
            self._end_fault()
        else:
            self.inbox += data
        self.wake()

    def _pass_on(self) -> None:
        """Pass the bytes that have arrived to the server, in their order, unless it is stopped."""
        server = self.network.server
        if server.silent_until > self.network.loop.time():
            self.network.loop.at(server.silent_until, self._pass_on)
            return
        while self._stalled and not self.session.is_over:
            self.session.receive(self._stalled.popleft())

    def wake(self) -> None:
        """Schedule a read in the next turn of the process, if there is anything to read."""
        if self.reader is not None and (self.inbox or self.is_over) and not self.is_closed:
            self.process.arrived[self] = self._read

    def _read(self) -> None:
        if self.reader is not None:
            is_last = self.is_over and not self.inbox
            self.reader()
            if not is_last:
                self.wake()

    def take(self) -> bytes:
        """Return the unread bytes."""
        data, self.inbox = bytes(self.inbox), bytearray()
        return data

    def close(self) -> None:
        """Close the client's end; data in flight to the server still arrives."""
        if not self.is_closed:
            self.is_closed = True
            self.reader = None
            self._end_fault()
            if self in self.network.links:
                self.network.links.remove(self)
            self.session.close()

    def _end_fault(self) -> None:
        if self.open_fault is not None:
            self.open_fault[1] = self.network.server.now_us()
            self.open_fault = None


class SimulatedTransport(asyncio.Transport):
    """A link for an asyncio protocol."""

    def __init__(self, link: Link, protocol: Any) -> None:
        super().__init__()
        self._link = link
        self._protocol = protocol
        link.reader = self._on_news

    def _on_news(self) -> None:
        link = self._link
        if link.inbox:
            self._protocol.data_received(link.take())
        if link.is_over and not link.is_closed:
            link.close()
            self._protocol.eof_received()
            self._protocol.connection_lost(None)

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def write(self, data: Any) -> None:
        self._link.send("server", bytes(data))

    def close(self) -> None:
        if not self._link.is_closed:
            self._link.close()
            self._link.network.loop.call_soon(self._protocol.connection_lost, None)

    abort = close

    def is_closing(self) -> bool:
        return self._link.is_closed

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


class SimulatedBackend(httpcore.AsyncNetworkBackend):
    """Connections for httpcore."""

    def __init__(self, network: Network) -> None:
        self._network = network

    async def connect_tcp(self, *_: Any, **__: Any) -> httpcore.AsyncNetworkStream:
        try:
            return SimulatedStream(await self._network.open())
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error


class SimulatedStream(httpcore.AsyncNetworkStream):
    """A link for httpcore."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._news = asyncio.Event()
        link.reader = self._news.set

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        link = self._link
        while not link.inbox and not link.is_over and not link.is_closed:
            self._news.clear()
            await self._news.wait()
        if link.is_closed:
            raise httpcore.ReadError("closed")
        return link.take()

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if self._link.is_over or self._link.is_closed:
            raise httpcore.WriteError("broken pipe")
        self._link.send("server", bytes(buffer))

    async def aclose(self) -> None:
        self._link.close()

    def get_extra_info(self, info: str) -> Any:
        return bool(self._link.inbox or self._link.is_over) if info == "is_readable" else None


class SimulatedPoller:
    """What tells whether there is something to read on a connection of libpq."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def wait(self, seconds: float, *, for_writing: bool = False) -> bool:
        return bool(self._link.inbox or self._link.is_over)


class SimulatedPGconn:
    """A connection of libpq in pipeline mode, as far as the store uses it.

    Messages are frames: a length, one byte of kind, and the rest. A frame to the server is a statement with its arguments. A
    frame from there is a value (`v`), no value (`n`), an error (`e`: SQLSTATE, severity, text), or the message of a server
    that ends the connection (`x`), after which nothing follows.
    """

    def __init__(self, link: Link) -> None:
        self.socket = link
        self.status = ConnStatus.OK
        self.nonblocking = 0
        self._buffer = bytearray()
        self._results: deque[Any] = deque()

    def enter_pipeline_mode(self) -> None:
        pass

    def send_query_prepared(self, name: bytes, arguments: Any, *_: Any) -> None:
        if self.status != ConnStatus.OK:
            raise OperationalError("no connection to the server")
        packed = b"".join(
            struct.pack(">i", -1) if a is None else struct.pack(">i", len(a)) + a for a in (name, *arguments)
        )
        self.socket.send("server", frame(b"q", packed))

    def pipeline_sync(self) -> None:
        pass

    def flush(self) -> int:
        return 0

    def consume_input(self) -> None:
        link = self.socket
        if link.inbox:
            self._buffer += link.take()
            for kind, body in frames(self._buffer):
                self._add(kind, body)
        elif link.is_over:
            self.status = ConnStatus.BAD
            raise OperationalError("server closed the connection unexpectedly")

    def _add(self, kind: bytes, body: bytes) -> None:
        sqlstate, severity, text = body.split(b" ", 2) if kind in b"ex" else (None, None, b"")
        fields = {
            DiagnosticField.SQLSTATE: sqlstate,
            DiagnosticField.SEVERITY_NONLOCALIZED: severity,
            DiagnosticField.MESSAGE_PRIMARY: text,
        }
        status = {b"v": ExecStatus.TUPLES_OK, b"n": ExecStatus.COMMAND_OK}.get(kind, ExecStatus.FATAL_ERROR)
        result = SimpleNamespace(
            status=int(status),
            get_value=lambda *_: body or None,
            error_field=fields.get,
            get_error_message=lambda: text.decode(),
        )
        self._results += (
            (result, None)
            if kind == b"x"
            else (result, None, SimpleNamespace(status=int(ExecStatus.PIPELINE_SYNC)))
        )

    def is_busy(self) -> int:
        return not self._results

    def get_result(self) -> Any:
        return self._results.popleft()

    def finish(self) -> None:
        self.status = ConnStatus.BAD
        if self.socket.is_over and not self.socket.inbox:
            self.socket.network.unread += len([result for result in self._results if result is not None]) > 1
        self.socket.close()


def frame(kind: bytes, body: bytes) -> bytes:
    """Return a message as it travels."""
    return struct.pack(">ic", len(body), kind) + body


def frames(buffer: bytearray) -> list[tuple[bytes, bytes]]:
    """Take all complete messages out of a buffer."""
    found = []
    while len(buffer) >= 5:
        size, kind = struct.unpack_from(">ic", buffer)
        if len(buffer) < 5 + size:
            break
        found.append((kind, bytes(buffer[5 : 5 + size])))
        del buffer[: 5 + size]
    return found
