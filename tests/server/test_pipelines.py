"""Pipelines of random requests from clients that read everything, something or nothing."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate_server.http import connection as http_connection
from headgate_server.http.connection import MAX_PIPELINED
from headgate_server.http.output import UNFLUSHED_BYTES
from headgate_server.http.server import KERNEL_BUFFER_BYTES, HttpServer
from tests.searching import EXAMPLES
from tests.server.support import READ_SECONDS, Server
from tests.server.test_http_server import started

HIGH_WATER_BYTES = 65_536
"""What an event loop's transport buffers before it pauses its writer."""

LARGEST_ANSWER = 65_536
"""More than the largest answer below, with its head."""


def request(line: bytes, body: bytes = b"", *fields: bytes) -> bytes:
    sized = (b"Content-Type: application/json", b"Content-Length: %d" % len(body)) if body else ()
    return b"\r\n".join((line + b" HTTP/1.1", b"Host: localhost", *sized, *fields, b"", body))


REQUESTS = {
    request(b"GET /healthz"): 200,
    request(b"GET /openapi.json"): 200,
    request(b"GET /nothing"): 404,
    request(b"POST /v1/limiters/login/hit", b'{"key":"\\r\\n\\r\\n"}'): 200,
    request(b"POST /v1/limiters/login/hit", b"{"): 400,
    request(b"GET /healthz", b"", b"X-Long: " + b"x" * 9_000): 200,
}
LAST = request(b"GET /v1/limiters/login", b"", b"Connection: close")


class Client(NamedTuple):
    """A client: its requests, the size of the pieces it sends, and the bytes it reads before it stalls."""

    requests: list[bytes]
    piece: int
    reads: float


clients = st.builds(
    Client,
    st.lists(st.sampled_from(list(REQUESTS)), max_size=20).map(lambda few: few * 6),
    st.sampled_from([1_000, 16_384, 1_000_000]),
    st.sampled_from([0, 1, 10_000, 200_000, math.inf]),
)


def test_clients_that_do_not_read_are_not_buffered_for() -> None:
    """They would fill the kernel's memory for TCP, and need no token for it."""
    greedy = Client([request(b"GET /openapi.json")] * 60, 1_000_000, reads=1)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(check([greedy] * 5)) == 5


@settings(max_examples=max(1, EXAMPLES // 4))
@given(several=st.lists(clients, min_size=1, max_size=4))
def test_every_pipeline_is_answered_in_order_with_bounded_buffers(several: list[Client]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(check(several))


async def check(several: Iterable[Client]) -> int:
    """Serve clients until each stalls, check the buffers, then serve the rest; return how many stalled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_connection, "UNREAD_SECONDS", math.inf)
        async with started(Server()) as (running, _, port), asyncio.timeout(READ_SECONDS):
            opened = [Conversation(port, client) for client in several]
            await asyncio.gather(*(each.read_some() for each in opened))
            await until_stalled(running)
            stalled = len(running.server_state.connections)
            check_bounds(running)
            for each in opened:
                await each.read_rest()
    return stalled


class Conversation:
    """A client's connection."""

    def __init__(self, port: int, client: Client) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._client = client
        self._sending = asyncio.ensure_future(self._send())
        self._received = bytearray()

    async def _send(self) -> None:
        data = b"".join(self._client.requests) + LAST
        for start in range(0, len(data), self._client.piece):
            await self._loop.sock_sendall(self._socket, data[start : start + self._client.piece])

    async def read_some(self) -> None:
        """Read until the client stalls."""
        while len(self._received) < self._client.reads and await self._read():
            pass

    async def _read(self) -> bytes:
        received = await self._loop.sock_recv(self._socket, 65_536)
        self._received += received
        return received

    async def read_rest(self) -> None:
        """Read to the end of the connection, and check the answers."""
        while await self._read():
            pass
        await self._sending
        self._socket.close()
        wanted = [REQUESTS[each] for each in self._client.requests]
        assert list(statuses(bytes(self._received))) == [*wanted, 200]


def statuses(received: bytes) -> Iterable[int]:
    """Yield the status of each answer; fail if anything else is between them."""
    while received:
        head, _, rest = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 "), head[:80]
        length = int(head.lower().split(b"\r\ncontent-length: ")[1].split(b"\r\n")[0])
        json.loads(rest[:length])
        yield int(head[9:12])
        received = rest[length:]


async def until_stalled(running: HttpServer) -> None:
    """Wait until every connection waits for its client to read, or to take the last answer."""
    connections: set[Any] = running.server_state.connections
    while any(each.writable is None and not each.transport.is_closing() for each in connections):  # noqa: ASYNC110
        await asyncio.sleep(0)


def check_bounds(running: HttpServer) -> None:
    for connection in running.server_state.connections:
        transport = connection.transport
        unsent = HIGH_WATER_BYTES + UNFLUSHED_BYTES + LARGEST_ANSWER
        assert transport.get_write_buffer_size() <= unsent
        assert len(connection.pipeline) <= MAX_PIPELINED
        found = transport.get_extra_info("socket")
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            assert found.getsockopt(socket.SOL_SOCKET, buffer) <= 2 * KERNEL_BUFFER_BYTES
