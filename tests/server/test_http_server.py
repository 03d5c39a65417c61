"""What carries requests: bounds on connections, in this process."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import resource
import signal
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from headgate_server.hosting import listen
from headgate_server.http import cap
from headgate_server.http import connection as http_connection
from headgate_server.http import server as http_server
from headgate_server.http.cap import MAX_CONNECTIONS, MAX_UNFLUSHED, RESERVED_FILES, ConnectionCap
from headgate_server.http.connection import MAX_AT_ONCE, MAX_PIPELINED, BoundedProtocol
from headgate_server.http.parser import HEAD_BYTES
from headgate_server.http.server import MIN_ACCEPTED, HttpServer
from tests.server.support import POLICY, READ_SECONDS, Server, turn_until


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def configuration(server: Server, *, lifespan: Literal["on", "off"] = "on") -> uvicorn.Config:
    return uvicorn.Config(server.app, http=BoundedProtocol, ws="none", lifespan=lifespan, log_config=None)


@asynccontextmanager
async def started(
    server: Server, listener: socket.socket | None = None, *, shares_listener: bool = False
) -> AsyncIterator[tuple[HttpServer, socket.socket, int]]:
    """Serve for the length of a block; give the server, its listener and the port."""
    listener, has_started = listener or listen("127.0.0.1", 0), asyncio.Event()
    port = listener.getsockname()[1]
    running = HttpServer(configuration(server), server.app, has_started.set, shares_listener=shares_listener)
    task = asyncio.ensure_future(running.serve([listener]))
    await has_started.wait()
    try:
        yield running, listener, port
    finally:
        running.should_exit = True
        await task


@asynccontextmanager
async def http_server_of(server: Server) -> AsyncIterator[int]:
    """Serve for the length of a block; give the port."""
    async with started(server) as (_, _, port):
        yield port


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop connections without patience, and look for them all the time."""
    monkeypatch.setattr(cap, "CHECK_SECONDS", 0.01)
    for name in ("HEAD_SECONDS", "UNREAD_SECONDS"):
        monkeypatch.setattr(http_connection, name, 0.0)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: loc"])
async def test_silent_connection_is_dropped(sent: bytes) -> None:
    async with http_server_of(Server()) as port:
        assert await answers_of(port, sent) == b""


@pytest.mark.usefixtures("_impatient")
async def test_unread_rest_of_a_body_is_dropped() -> None:
    """Every byte of it ends uvicorn's own timer for idle connections."""
    head = b"POST /v1/batch HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
    async with conversation(head) as (reader, writer):
        assert b" 415 " in await reader.readuntil(b"}")
        writer.write(b"x")
        assert await reader.read() == b""


async def test_complete_request_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "HEAD_SECONDS", 0.0)
    events = b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with conversation(events) as (reader, _):
        seen = b""
        # Which takes longer than the time between two looks for stalled heads.
        while seen.count(b"event: tick") < 2:
            seen += await reader.read(65536)


async def test_each_head_of_a_connection_is_bounded() -> None:
    async with conversation() as (reader, writer):
        filler = b"X-Filler: " + b"x" * 20_000
        for _ in range(3):
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + filler)
            await writer.drain()
            writer.write(b"\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert await reader.readexactly(15) == b'{"status":"ok"}'


@asynccontextmanager
async def connected(
    port: int, sent: bytes = b""
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect for the length of a block."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        yield reader, writer
    finally:
        writer.close()


@asynccontextmanager
async def conversation(
    sent: bytes = b"",
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect to a new server for the length of a block."""
    async with (
        http_server_of(Server()) as port,
        asyncio.timeout(READ_SECONDS),
        connected(port, sent) as streams,
    ):
        yield streams


HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def healthy(port: int) -> bytes:
    """Ask for health on a new connection, and return the status."""
    async with asyncio.timeout(READ_SECONDS), connected(port, HEALTH) as (reader, _):
        return (await reader.readuntil(b"\r\n")).split()[1]


@pytest.mark.parametrize("size", [HEAD_BYTES + 1, 60_000])
async def test_a_large_head_in_one_piece_is_refused_too(size: int) -> None:
    async with http_server_of(Server()) as port:
        large = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Filler: %b\r\n\r\n" % (b"x" * size)
        async with connected(port, large) as (reader, _):
            assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
        async with connected(port, request_with_body(b'{"key":"a"}') + large) as (reader, _):
            answers = await reader.read()
            assert b" 431 " in answers


def request_with_body(body: bytes) -> bytes:
    fields = b"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: %d" % len(body)
    return b"POST /v1/limiters/login/hit HTTP/1.1\r\n%b\r\n\r\n%b" % (fields, body)


async def test_pipeline_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that pipelines and never reads: its input is not parsed further, and reading stops."""
    server, let_go = Server(), asyncio.Event()

    async def never(*_: Any) -> None:
        await let_go.wait()

    monkeypatch.setattr(server.app, "_answer", never)
    state = ServerState()
    connection, transport = connection_of(server, state)
    connection.data_received(HEALTH * 10_000)
    assert len(connection.pipeline) == MAX_PIPELINED
    assert transport.pause_reading.called
    assert not transport.resume_reading.called
    transport.pause_reading.reset_mock()
    connection.data_received(HEALTH)  # as from uvloop, which reads after `connection_made` although paused
    assert transport.pause_reading.called
    let_go.set()
    connection.connection_lost(None)
    await turn_until(lambda: not state.tasks)


def connection_of(server: Server, state: ServerState) -> tuple[BoundedProtocol, Mock]:
    """Return a connection that is not one, and its transport."""
    config = configuration(server, lifespan="off")
    config.load()
    transport = Mock(spec=asyncio.Transport)
    transport.get_extra_info.side_effect = {"sockname": ("127.0.0.1", 8080)}.get
    transport.is_closing.return_value = False
    connection = BoundedProtocol(config, state, {})
    connection.connection_made(transport)
    return connection, transport


async def test_pipelining_connection_does_not_starve_others() -> None:
    state = ServerState()
    connection, transport = connection_of(Server(), state)
    connection.data_received(HEALTH * 1000)
    assert state.total_requests == MAX_AT_ONCE
    transport.write.assert_not_called()  # all answers of a turn leave together
    while state.total_requests < 1000:
        before = state.total_requests
        await asyncio.sleep(0)
        assert state.total_requests <= before + MAX_AT_ONCE
    connection.flush()
    written = b"".join(call.args[0] for call in transport.write.call_args_list)
    assert written.count(b"HTTP/1.1 200 ") == 1000
    assert transport.write.call_count <= 1000 / MAX_AT_ONCE + 1


async def test_responses_of_one_iteration_are_all_written() -> None:
    server, state = Server(), ServerState()
    many = [connection_of(server, state) for _ in range(3 * MAX_UNFLUSHED)]
    for _ in range(2):
        for connection, _ in many:
            connection.data_received(HEALTH)
        await asyncio.sleep(0)
    assert [transport.write.call_count for _, transport in many] == [2] * len(many)


def test_clients_that_connect_together_are_accepted_together() -> None:
    """Libuv would accept one in a turn of the event loop, so this one is uvloop's."""

    async def turns_to_accept(clients: int) -> int:
        server = Server()
        listener = listen("127.0.0.1", 0)
        running = HttpServer(configuration(server), server.app, lambda: None)
        with ExitStack() as stack:
            for _ in range(clients):
                stack.enter_context(socket.create_connection(listener.getsockname()))
            task = asyncio.ensure_future(running.serve([listener]))
            await turn_until(lambda: running.server_state.connections)
            turns = 0
            while len(running.server_state.connections) < clients:
                await asyncio.sleep(0)
                turns += 1
        running.should_exit = True
        await task
        return turns

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(turns_to_accept(200)) < 50


async def test_worker_leaves_waiting_clients_to_other_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "OTHER_WORKERS_SECONDS", 3600.0)
    monkeypatch.setattr(http_server, "DRAIN_SECONDS", 0.0)
    listener = listen("127.0.0.1", 0)
    with ExitStack() as stack:
        other = stack.enter_context(listener.dup())
        for _ in range(2 * MIN_ACCEPTED):
            stack.enter_context(socket.create_connection(listener.getsockname()))
        async with started(Server(), listener, shares_listener=True) as (worker, _, _):
            await turn_until(lambda: worker.server_state.connections)
            for _ in range(10):
                await asyncio.sleep(0)
            assert len(worker.server_state.connections) == MIN_ACCEPTED
            for _ in range(MIN_ACCEPTED):
                stack.enter_context(other.accept()[0])
            with pytest.raises(BlockingIOError):
                other.accept()


async def test_waiting_clients_are_answered_at_stop() -> None:
    server = Server()
    listener = listen("127.0.0.1", 0)
    config = configuration(server)
    config.load()
    running = HttpServer(config, server.app, lambda: None)
    running.lifespan = config.lifespan_class(config)
    await running.startup([listener])
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(listener.getsockname())) for _ in range(4)]
        for client in clients:
            client.sendall(HEALTH)
        await running.shutdown([listener])
        for client in clients:
            answer = client.recv(1000)
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b"connection: close" in answer


@pytest.mark.parametrize("sent", [b"", b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_many_clients_leave_files_for_stores(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """New connections and those that make room for them are open at the same time."""
    monkeypatch.setattr(cap, "_open_files", lambda: 256)
    monkeypatch.setattr(http_server, "DRAIN_SECONDS", 0.0)
    accept, seen = socket.socket.accept, list[int]()

    def counted(listener: socket.socket) -> Any:
        seen.append(open_files())
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", counted)

    async def serve_all(clients: int) -> None:
        with ExitStack() as stack:
            async with http_server_of(Server()) as port:
                # Clients are half of the open files: they are this process as well.
                for _ in range(clients):
                    client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                    client.sendall(sent)
                before = open_files()
                await turn_until(lambda: len(seen) == clients)
                assert max(seen) - before <= 256 - RESERVED_FILES // 2

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_all(400))


async def test_accepting_pauses_without_free_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "ACCEPT_PAUSE_SECONDS", 0.01)
    server, accept = Server(), socket.socket.accept
    failures = [OSError(errno.EMFILE, "Too many open files")]

    def fail_once(listener: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail_once)
    async with http_server_of(server) as port:
        assert await healthy(port) == b"200"
    assert caplog.messages == ["no connections are accepted for 0.01 s: [Errno 24] Too many open files"]


@pytest.mark.parametrize(
    ("fields", "status"),
    [(b"", b"400"), (b"Host: localhost\r\nHost: localhost\r\n", b"400"), (b"Host: localhost\r\n", b"200")],
)
async def test_request_needs_one_host_field(fields: bytes, status: bytes) -> None:
    """RFC 9112, section 3.2."""
    async with http_server_of(Server()) as port:
        decide = b"GET /healthz HTTP/1.1\r\n%bConnection: close\r\n\r\n" % fields
        assert (await answers_of(port, decide)).split()[1] == status


CHUNKED = b"Host: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


def statuses(answers: bytes) -> list[int]:
    """Return the status of each answer."""
    return [int(each[:3]) for each in answers.split(b"HTTP/1.1 ")[1:]]


async def answers_of(port: int, *sent: bytes) -> bytes:
    """Send pieces on one connection, and return all that is answered until it is closed."""
    async with asyncio.timeout(READ_SECONDS), connected(port) as (reader, writer):
        for piece in sent:
            writer.write(piece)
            await writer.drain()
        return await reader.read()


def slow_health(server: Server, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Delay responses until the returned event is set."""
    let_go, answer = asyncio.Event(), server.app._answer

    async def slow(*arguments: Any) -> Any:
        await let_go.wait()
        return await answer(*arguments)

    monkeypatch.setattr(server.app, "_answer", slow)
    return let_go


@pytest.mark.parametrize(
    ("behind", "status"),
    [
        (b"no request\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX-Filler: %b\r\n\r\n" % (b"x" * HEAD_BYTES), 431),
        (b"POST /v1/limiters/login/hit HTTP/1.1\r\n" + CHUNKED + b"no chunk\r\n", 400),
    ],
)
async def test_invalid_request_is_answered_in_order(
    behind: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    let_go = slow_health(server, monkeypatch)
    refused, end_with = asyncio.Event(), BoundedProtocol.end_with

    def seen(*arguments: Any) -> None:
        end_with(*arguments)
        refused.set()

    monkeypatch.setattr(BoundedProtocol, "end_with", seen)
    async with http_server_of(server) as port:
        answers = asyncio.ensure_future(answers_of(port, HEALTH + behind))
        await refused.wait()
        let_go.set()
        assert statuses(await answers) == [200, status]


async def test_invalid_body_ends_only_its_request() -> None:
    async with http_server_of(Server()) as port:
        head = b"POST /v1/limiters/login/hit HTTP/1.1\r\n" + CHUNKED
        answers = await answers_of(port, head + b"1\r\n{\r\n", b"no chunk\r\n")
        assert statuses(answers) == [400]


@pytest.mark.parametrize("is_taken", [False, True])
async def test_body_in_pieces_is_put_together(is_taken: bool) -> None:
    """Whether or not the application takes each piece before the next one arrives."""
    connection, transport = connection_of(Server(), ServerState())
    sent = request_with_body(b'{"key":"alice","cost":2}')
    for piece in (sent[:-20], sent[-20:-12], sent[-12:-5], sent[-5:]):
        connection.data_received(piece)
        for _ in range(3 * is_taken):
            await asyncio.sleep(0)
    await turn_until(lambda: transport.write.called)
    assert b'"remaining":3' in transport.write.call_args.args[0]
    connection.connection_lost(None)


async def test_large_body_in_one_piece_is_refused() -> None:
    """Head and body arrive together, so no task with a timeout runs yet."""
    server = Server(POLICY + "[server]\nlargest_body = 100")
    connection, transport = connection_of(server, ServerState())
    head = b"POST /v1/limiters/login/hit HTTP/1.1\r\n" + CHUNKED
    connection.data_received(head[:-1])
    rest = head[-1:] + b"65\r\n%b\r\n0\r\n\r\n" % (b"x" * 101)
    asyncio.get_running_loop().call_soon(connection.data_received, rest)
    await asyncio.sleep(0)
    connection.flush()
    assert transport.write.call_args.args[0].split()[1] == b"413"


async def test_started_response_is_not_corrupted() -> None:
    async with conversation() as (reader, writer):
        writer.write(b"GET /v1/events HTTP/1.1\r\n" + CHUNKED)
        await reader.readuntil(b"event: history")
        writer.write(b"no chunk\r\n")
        assert b"HTTP/1.1" not in await reader.read()


async def test_trailers_are_not_header_fields() -> None:
    """A proxy has not checked them."""
    body = b'b\r\n{"key":"a"}\r\n0\r\n%b\r\n\r\n'
    async with http_server_of(Server()) as port:
        hit = b"POST /v1/limiters/login/hit HTTP/1.1\r\n" + CHUNKED + body
        answers = await answers_of(
            port, hit % b"X-Forwarded-For: 192.0.2.1", hit % b"Host: example", b"x\r\n\r\n"
        )
        assert statuses(answers) == [200, 200, 400]


@pytest.mark.parametrize("piece", [b"X: y\r\n" * 1000, b"x" * 6000])
async def test_trailers_are_bounded(piece: bytes) -> None:
    connection, transport = connection_of(Server(), ServerState())
    connection.data_received(b"POST /v1/limiters/login/hit HTTP/1.1\r\n" + CHUNKED + b"0\r\nX: ")
    for _ in range(1 + HEAD_BYTES // len(piece)):
        connection.data_received(piece)
    assert b" 431 " in transport.write.call_args.args[0]
    assert transport.close.called
    connection.connection_lost(None)


@pytest.mark.parametrize("complete", [1, 2])
async def test_requests_before_a_truncated_one_are_answered(
    monkeypatch: pytest.MonkeyPatch, complete: int
) -> None:
    """Also if the first waits for its store when the input ends in the middle of the last."""
    server, state = Server(), ServerState()
    let_go = slow_health(server, monkeypatch)
    connection, transport = connection_of(server, state)
    connection.data_received(HEALTH * complete)
    connection.data_received(b"POST /v1/batch HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nabc")
    assert connection.eof_received()
    let_go.set()
    await turn_until(lambda: not state.tasks)
    written = b"".join(call.args[0] for call in transport.write.call_args_list)
    assert written.count(b"HTTP/1.1 200 ") == complete
    assert written.count(b"connection: close") == 1
    assert transport.close.called


@pytest.mark.parametrize("version", [b"1.0\r\nConnection: keep-alive", b"1.1\r\nConnection: close"])
async def test_input_after_the_last_request_is_ignored(version: bytes) -> None:
    server = Server()
    first = request_with_body(b'{"key":"a"}').replace(b"1.1", version)
    async with http_server_of(server) as port:
        answers = await answers_of(port, first + request_with_body(b'{"key":"a"}') + b"no request\r\n\r\n")
        assert statuses(answers) == [200]
        answers = await answers_of(port, first)
        assert json.loads(answers.split(b"\r\n\r\n")[1])["remaining"] == 3


@pytest.mark.parametrize("requests", [1, 10 * MAX_AT_ONCE])
def test_client_that_half_closes_before_accept_is_answered(requests: int) -> None:
    """With uvloop the end is read before the answers are written, and although reading was paused."""

    async def answers() -> bytes:
        async with http_server_of(Server()) as port, asyncio.timeout(READ_SECONDS):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(HEALTH * requests)
                client.shutdown(socket.SHUT_WR)
                reader, writer = await asyncio.open_connection(sock=client)
                read = await reader.read()
                writer.close()
                return read

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(answers()).count(b"HTTP/1.1 200 ") == requests


async def test_upgrade_request_keeps_its_body() -> None:
    """Java's client asks for HTTP/2 with every first request."""
    upgrade = b"\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA"
    hit = request_with_body(b'{"key":"a"}').replace(b"\r\n\r\n", upgrade + b"\r\n\r\n")
    last = HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    async with http_server_of(Server()) as port:
        for sent in ([hit + last], [hit[:-5], hit[-5:] + last]):
            answers = await answers_of(port, *sent)
            assert statuses(answers) == [200, 200]
        assert b" 400 " in await answers_of(port, b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n")


async def test_upgrade_request_keeps_its_version() -> None:
    """The answer to one of HTTP/1.0 ends the connection, and has no chunks."""
    decide = b"GET /healthz HTTP/1.0\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    async with http_server_of(Server()) as port:
        answer = await answers_of(port, decide)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nconnection: close\r\n" in answer
        events = decide.replace(b"/healthz", b"/v1/events")
        async with asyncio.timeout(READ_SECONDS), connected(port, events) as (reader, _):
            assert b"chunked" not in await reader.readuntil(b"\r\n\r\n")


async def test_client_that_still_sends_can_read_the_response() -> None:
    """A connection that is closed under what arrives is reset, and the answer lost with it."""
    async with conversation() as (reader, writer):
        body = b"x" * 16_000_000
        writer.write(request_with_body(body)[: -len(body)])
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 413 ")
        writer.write(body)
        await writer.drain()
        await reader.read()


async def test_refused_body_with_expect_ends_the_connection() -> None:
    """The client may send it or not; what follows could be taken for it."""
    refused = (
        b"POST /v1/batch HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n"
    )
    async with http_server_of(Server()) as port:
        answer = await answers_of(port, refused)
        assert answer.startswith(b"HTTP/1.1 415 ")
        assert b"\r\nconnection: close\r\n" in answer


async def test_http_1_0_gets_no_chunks_and_no_interim_responses() -> None:
    async with (
        http_server_of(Server()) as port,
        asyncio.timeout(READ_SECONDS),
        connected(port, b"GET /v1/events HTTP/1.0\r\nHost: localhost\r\n\r\n") as (reader, _),
    ):
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"chunked" not in head
        assert (await reader.readline()).startswith(b"retry: ")
        hit = request_with_body(b'{"key":"a"}').replace(b"1.1\r\n", b"1.0\r\nExpect: 100-continue\r\n")
        assert (await answers_of(port, hit[:-5], hit[-5:])).startswith(b"HTTP/1.1 200 ")


@pytest.mark.usefixtures("_impatient")
async def test_client_that_does_not_read_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    decide = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with http_server_of(Server()) as port, asyncio.timeout(READ_SECONDS):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        with suppress(ConnectionError):
            while True:
                writer.write(decide * 100)
                await writer.drain()
        assert await healthy(port) == b"200"
    assert caplog.messages == []


async def test_idle_connections_make_room_at_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cap, "MAX_CONNECTIONS", 3)
    async with http_server_of(Server()) as port, AsyncExitStack() as stack:
        first, second, _ = [
            await stack.enter_async_context(connected(port, sent)) for sent in (b"", HEALTH, b"GET /healthz")
        ]
        await second[0].readuntil(b"}")
        for _ in range(3):
            assert await healthy(port) == b"200"
        assert await first[0].read() == b""  # it had waited for longest


def test_response_is_written_before_its_connection_is_cut() -> None:
    """Both in one iteration of the event loop, before uvloop has written its buffer."""

    async def answers() -> bytes:
        async with http_server_of(Server()) as port, asyncio.timeout(READ_SECONDS):
            with ExitStack() as stack:
                clients = []
                for _ in range(2):  # accepted together; the second takes the place of the first
                    clients.append(stack.enter_context(socket.create_connection(("127.0.0.1", port))))
                    clients[-1].sendall(HEALTH)
                reader, writer = await asyncio.open_connection(sock=clients[0])
                read = await reader.read()
                writer.close()
                return read

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cap, "MAX_CONNECTIONS", 1)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            assert runner.run(answers()).startswith(b"HTTP/1.1 200 ")


async def test_above_the_cap_only_health_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cap, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(http_connection, "MAX_SURPLUS", 1)
    events = b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with http_server_of(Server()) as port, AsyncExitStack() as stack:
        for _ in range(2):
            reader, _ = await stack.enter_async_context(connected(port, events))
            await reader.readuntil(b"history")
        assert await healthy(port) == b"200"
        async with connected(port, request_with_body(b'{"key":"a"}')) as (reader, _):
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 503 ")
        async with connected(port, events[:-2]) as (waits, _):
            await asyncio.sleep(0)
            assert await healthy(port) == b"200"
            assert await waits.read() == b""


async def test_the_cap_leaves_files_for_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(256, 256)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: limits.append(wanted))
    assert ConnectionCap().limit == 256 - RESERVED_FILES
    assert limits == [(256, 256)]
    limits[:] = [(256, 4096)]
    assert ConnectionCap().limit == 4096 - RESERVED_FILES
    assert limits[-1] == (4096, 4096)
    limits[:] = [(resource.RLIM_INFINITY, resource.RLIM_INFINITY)]
    assert ConnectionCap().limit == MAX_CONNECTIONS


async def test_responses_at_stop_end_their_connection() -> None:
    """Connections that are kept alive are not closed under a request that was just sent."""
    async with (
        started(Server()) as (running, listener, port),
        AsyncExitStack() as stack,
        asyncio.timeout(READ_SECONDS),
    ):
        connections = [await stack.enter_async_context(connected(port, HEALTH)) for _ in range(8)]
        for reader, _ in connections:
            assert b"connection: close" not in await reader.readuntil(b"}")
        running.should_exit = True
        await turn_until(lambda: listener.fileno() < 0)
        for _, writer in connections:
            writer.write(HEALTH)
        for reader, _ in connections:
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b"connection: close" in answer


async def test_endless_requests_are_cut_off_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "DRAIN_SECONDS", 0.0)
    monkeypatch.setattr(http_server, "GRACE_SECONDS", 0.1)
    async with AsyncExitStack() as stack, asyncio.timeout(READ_SECONDS):
        async with http_server_of(Server()) as port:
            reader, _ = await stack.enter_async_context(connected(port, request_with_body(b"{}")[:-1]))
            assert await healthy(port) == b"200"
        assert await reader.read() == b""
    assert caplog.messages == ["1 requests did not end within 0.1 s and are cut off"]


async def test_request_of_a_disconnected_client_is_finished_at_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may settle a hold."""
    server, has_begun, may_end, has_ended = Server(), asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(*_: Any) -> None:
        has_begun.set()
        await may_end.wait()
        has_ended.set()

    monkeypatch.setattr(server.app, "_answer", slow)
    monkeypatch.setattr(http_server, "DRAIN_SECONDS", 0.0)
    async with asyncio.timeout(READ_SECONDS), http_server_of(server) as port:
        async with connected(port, HEALTH) as (_, writer):
            await has_begun.wait()
            reset_at_close = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset_at_close)
        asyncio.get_running_loop().call_later(0.3, may_end.set)
    assert has_ended.is_set()


async def test_forced_stop_cancels_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, has_begun, seen = Server(), asyncio.Event(), list[type[BaseException]]()

    async def never(*_: Any) -> None:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        except BaseException as error:
            seen.append(type(error))
            raise

    monkeypatch.setattr(server.app, "_answer", never)
    monkeypatch.setattr(http_server, "DRAIN_SECONDS", 0.0)
    async with AsyncExitStack() as stack:
        async with started(server) as (running, _, port):
            await stack.enter_async_context(connected(port, HEALTH))
            await has_begun.wait()
            running.should_exit = running.force_exit = True
        await asyncio.sleep(0)
    assert seen == [asyncio.CancelledError]


async def test_body_is_not_counted_to_the_next_head() -> None:
    state = ServerState()
    connection, transport = connection_of(Server(), state)
    body = b'{"key": "a"}'.ljust(40_000)
    connection.data_received(
        b"POST /v1/limiters/login/hit HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 40000\r\n\r\n" + body + b"GET /healthz HTTP/1.1\r\nHost: loc"
    )
    async with asyncio.timeout(READ_SECONDS):
        await turn_until(lambda: transport.write.called)
        connection.data_received(b"alhost\r\n\r\n")
        await turn_until(lambda: transport.write.call_count == 2)
    written = b"".join(call.args[0] for call in transport.write.mock_calls)
    assert written.count(b"HTTP/1.1 200 ") == 2
    assert not transport.close.called
    connection.connection_lost(None)
    await turn_until(lambda: not state.tasks)


async def test_slow_event_client_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its connection is aborted, although the client has not read everything."""
    caplog.set_level(logging.INFO, "headgate")
    server, dropped = Server(), asyncio.Event()
    send_stream = server.app._stream

    async def stream(*arguments: Any) -> None:
        await send_stream(*arguments)
        dropped.set()

    monkeypatch.setattr(server.app, "_stream", stream)
    tick = server.tick(1)
    for number in range(3000):
        tick.totals[f"limiter {number} {'x' * 3000}"] = tick.totals["login"]
    monkeypatch.setattr("headgate_server.app.STALLED", 0.5)
    async with http_server_of(server) as port:
        client = socket.socket()
        client.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536
        )  # a system may keep more than there is to send
        client.connect(("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=client, limit=1024)
        server.app._events.publish(tick)
        writer.write(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"\r\n")
        # Nothing is read until the server gives up; then the connection ends without the end of the stream.
        await dropped.wait()
        received = await reader.read()
        writer.close()
    assert len(received) < 9_000_000
    assert not received.endswith(b"0\r\n\r\n")
    assert caplog.messages == ["dropped a client of /v1/events that read nothing for 0.5 s"]


async def test_signal_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    async with http_server_of(Server()):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
