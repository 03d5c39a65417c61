"""Connections in memory: bytes arrive late, in pieces, partly, or never.

A `Link` is one connection. Clients use it as an asyncio transport or as a socket, servers through a session.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.simulation.timeline import Process, Timeline, WrongClock


class Network:
    """All servers of a store, and the connections to them.

    Attributes:
        clock: The clock of the servers.
        servers: The servers by port.
        links: The open connections.
        faults: Start, end and kind of each fault, by the clock of the servers in microseconds; the end may change.
        injected: The number of faults by kind.
        unread: The number of replies that had arrived but were unread when their connection was closed.
    """

    def __init__(self, timeline: Any) -> None:
        self.timeline: Timeline = timeline
        self.rng = timeline.rng
        self.clock = WrongClock(timeline.now_us)
        self.servers: dict[int, Any] = {}
        self.links: list[Link] = []
        self.faults: list[list[Any]] = []
        self.injected: dict[str, int] = {}
        self.unread = 0
        timeline.connect = self.open_stream

    def now_us(self) -> int:
        """Return the time of the servers' clock in microseconds."""
        return self.clock.now_us()

    def count(self, kind: str) -> None:
        """Count a fault that must not make calls fail."""
        self.injected[kind] = self.injected.get(kind, 0) + 1

    def fault(self, kind: str, seconds: float) -> list[Any]:
        """Count a fault of this duration."""
        self.count(kind)
        now = self.now_us()
        span = [now, now + round(seconds * 1e6), kind]
        self.faults.append(span)
        return span

    def latency(self) -> float:
        """Return the random latency of a message in seconds."""
        choice = self.rng.random()
        return 5e-5 + (self.rng.random() ** 3) * (2e-4 if choice < 0.9 else 0.01)

    def dial(self, port: int, on_end: Callable[[bool], object]) -> None:
        """Request a connection to a port; call `on_end` with whether the server accepts it."""
        server, timeline = self.servers[port], self.timeline
        at = max(timeline.time(), server.silent_until) + self.latency()
        timeline.at(at, lambda: on_end(server.is_up))

    def link(self, port: int, process: Process) -> Link:
        """Return a new connection of a process."""
        link = Link(self, self.servers[port], process)
        self.links.append(link)
        return link

    async def open(self, port: int) -> Link:
        """Connect a task."""
        opened, process = asyncio.get_running_loop().create_future(), self.timeline.current()

        def finish(is_accepted: bool) -> None:
            if not opened.done():
                process.context.run(opened.set_result, is_accepted)

        self.dial(port, finish)
        if not await opened:
            raise ConnectionRefusedError(111, "Connect call failed")
        return self.link(port, process)

    async def open_stream(self, factory: Callable[[], Any], port: int) -> tuple[Any, Any]:
        """Connect an asyncio protocol, like `create_connection`."""
        link = await self.open(port)
        protocol = factory()
        transport = SimulatedTransport(link, protocol)
        protocol.connection_made(transport)
        return transport, protocol

    def open_socket(self, port: int, seconds: float) -> SimulatedSocket:
        """Connect a thread."""
        opened, process = list[bool](), self.timeline.current()
        self.dial(port, opened.append)
        if not self.timeline.wait(lambda: bool(opened), seconds):
            raise TimeoutError("timed out")
        if not opened[0] or process.is_dead:
            raise ConnectionRefusedError(111, "Connection refused")
        return SimulatedSocket(self.link(port, process), seconds)


class Link:
    """One connection.

    Attributes:
        server: The server at its end.
        process: The process that opened it.
        inbox: Bytes that arrived at the client and are unread.
        is_over: Whether the client has received the end of the connection.
        is_closed: Whether the client has closed it.
        reader: Called in a turn of the process while there is something to read.
        left: The number of bytes that the server and the client can still receive; `None` for no limit.
        loses_data: Whether everything sent on it is lost silently.
        open_fault: The fault that lasts until the client notices it.
    """

    def __init__(self, network: Network, server: Any, process: Process) -> None:
        self.network = network
        self.server = server
        self.process = process
        self.inbox = bytearray()
        self.is_over = self.is_closed = self.loses_data = False
        self.reader: Callable[[], None] | None = None
        self.left: dict[str, int | None] = {"server": None, "client": None}
        self.open_fault: list[Any] | None = None
        self._last = {"server": 0.0, "client": 0.0}
        self._is_broken = False
        self._stalled: deque[bytes] = deque()
        self.session: Any = server.session(self)

    def send(self, to: str, data: bytes) -> None:
        """Send bytes to the `server` or to the `client`; they arrive later, and in any number of pieces."""
        if self._is_broken or self.loses_data or (to == "server" and self.is_closed):
            return
        timeline, rng, left = self.network.timeline, self.network.rng, self.left[to]
        if left is not None:
            data, self.left[to] = data[:left], max(0, left - len(data))
        while data:
            size = rng.randrange(1, len(data) + 1) if rng.random() < 0.1 else len(data)
            piece, data = data[:size], data[size:]
            at = self._last[to] = max(self._last[to] + 1e-9, timeline.time() + self.network.latency())
            timeline.at(at, partial(self._arrive, to, piece))
        if left is not None and not self.left[to]:
            self.break_off()

    def delay(self, to: str, seconds: float) -> None:
        """Delay everything sent from now on."""
        self._last[to] = max(self._last[to], self.network.timeline.time() + seconds)

    def break_off(self) -> None:
        """End the connection; both sides notice it after the data in flight."""
        if not self._is_broken:
            self._is_broken = True
            timeline = self.network.timeline
            for to in self._last:
                at = max(self._last[to], timeline.time()) + self.network.latency()
                timeline.at(at, partial(self._arrive, to, None))

    def _arrive(self, to: str, data: bytes | None) -> None:
        if to == "server":
            if not self.server.is_up:
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
        timeline = self.network.timeline
        if self.server.silent_until > timeline.time():
            timeline.at(self.server.silent_until, self._pass_on)
            return
        while self._stalled and not self.session.is_over:
            self.session.receive(self._stalled.popleft())

    def has_news(self) -> bool:
        """Return whether there is something to read."""
        return bool(self.inbox) or self.is_over

    def wake(self) -> None:
        """Schedule a read in the next turn of the process, if there is anything to read."""
        if self.reader is not None and self.has_news() and not self.is_closed:
            self.process.arrived[self] = self._read  # type: ignore[attr-defined]

    def _read(self) -> None:
        if self.reader is not None:
            is_last = self.is_over and not self.inbox
            self.reader()
            if not is_last:
                self.wake()

    def take(self, size: int | None = None) -> bytes:
        """Return the unread bytes, or the first of them."""
        data, self.inbox = bytes(self.inbox[:size]), self.inbox[len(self.inbox) if size is None else size :]
        return data

    def close(self) -> None:
        """Close the client's end; data in flight to the server still arrives."""
        if not self.is_closed:
            self.is_closed = True
            self.reader = None
            self._end_fault()
            if self in self.network.links:
                self.network.links.remove(self)

    def _end_fault(self) -> None:
        if self.open_fault is not None:
            self.open_fault[1] = self.network.now_us()
            self.open_fault = None


class SimulatedTransport(asyncio.Transport):
    """The transport of a link, for an asyncio protocol."""

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
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    abort = close

    def is_closing(self) -> bool:
        return self._link.is_closed

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


class SimulatedSocket:
    """The socket of a link; threads wait for it through the timeline."""

    def __init__(self, link: Link, seconds: float | None) -> None:
        self._link = link
        self._seconds = seconds

    def setblocking(self, blocks: bool) -> None:
        self._seconds = None if blocks else 0.0

    def settimeout(self, seconds: float | None) -> None:
        self._seconds = seconds

    def fileno(self) -> Any:
        return self._link

    def recv(self, size: int) -> bytes:
        link, seconds = self._link, 1e6 if self._seconds is None else self._seconds
        if link.is_closed:
            raise OSError(9, "Bad file descriptor")
        if not link.has_news() and not (seconds and link.network.timeline.wait(link.has_news, seconds)):
            raise socket.timeout if seconds else BlockingIOError
        return link.take(size)

    def recv_into(self, buffer: bytearray) -> int:
        data = self.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def send(self, data: Any) -> int:
        if self._link.is_over or self._link.is_closed:
            raise BrokenPipeError(32, "Broken pipe")
        self._link.send("server", bytes(data))
        return len(data)

    def sendall(self, data: Any) -> None:
        self.send(data)

    def shutdown(self, how: int) -> None:
        pass

    def close(self) -> None:
        self._link.close()


class SimulatedPoller:
    """Waits for data of a link in a thread; tasks do not wait here."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def wait(self, seconds: float, *, for_writing: bool = False) -> bool:
        link = self._link
        return link.has_news() or (seconds > 0 and link.network.timeline.wait(link.has_news, seconds))
