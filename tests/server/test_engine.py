"""What carries requests: bounds on connections, in this process."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn
from uvicorn.server import ServerState

from headgate.server import engine
from headgate.server.engine import BoundedProtocol, Engine
from headgate.server.serving import listen
from tests.server.support import READ_SECONDS, Server


@asynccontextmanager
async def engine_of(server: Server) -> AsyncIterator[int]:
    """Serve for the length of a block; give the port."""
    listener, has_started = listen("127.0.0.1", 0), asyncio.Event()
    port: int = listener.getsockname()[1]
    config = uvicorn.Config(server.app, http=BoundedProtocol, ws="none", lifespan="on", log_config=None)
    running = Engine(config, server.app, has_started.set)
    task = asyncio.ensure_future(running.serve([listener]))
    await has_started.wait()
    try:
        yield port
    finally:
        running.should_exit = True
        await task


async def test_a_head_that_stalls_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "HEAD_SECONDS", 0.0)
    async with engine_of(Server()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: loc")
        assert await reader.read() == b""
        writer.close()


async def test_a_connection_on_which_nothing_arrives_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "HEAD_SECONDS", 0.0)
    async with engine_of(Server()) as port, asyncio.timeout(READ_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
        writer.close()


async def test_the_rest_of_a_body_that_nobody_reads_keeps_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every byte of it ends uvicorn's own timer for idle connections."""
    monkeypatch.setattr(engine, "HEAD_SECONDS", 0.0)
    async with engine_of(Server()) as port, asyncio.timeout(READ_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/batch HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n")
        assert b" 415 " in await reader.readuntil(b"}")
        writer.write(b"x")
        assert await reader.read() == b""
        writer.close()


async def test_a_connection_that_has_sent_all_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "HEAD_SECONDS", 0.0)
    async with engine_of(Server()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        seen = b""
        while (
            seen.count(b"event: tick") < 2
        ):  # which takes longer than the time between two looks for stalled heads
            seen += await reader.read(65536)
        writer.close()


async def test_heads_on_one_connection_are_bounded_each() -> None:
    async with engine_of(Server()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        filler = b"X-Filler: " + b"x" * 20_000
        for _ in range(3):
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + filler)
            await writer.drain()
            writer.write(b"\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert await reader.readexactly(15) == b'{"status":"ok"}'
        writer.close()


async def test_the_body_before_a_head_is_not_counted_to_it() -> None:
    server = Server()
    config = uvicorn.Config(server.app, http=BoundedProtocol, ws="none", lifespan="off", log_config=None)
    config.load()
    state, transport = ServerState(), Mock(spec=asyncio.Transport)
    transport.get_extra_info.side_effect = {"sockname": ("127.0.0.1", 8080)}.get
    transport.is_closing.return_value = False
    connection = BoundedProtocol(config, state, {})
    connection.connection_made(transport)
    body = b'{"key": "a"}'.ljust(40_000)
    connection.data_received(
        b"POST /v1/limiters/login/hit HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 40000\r\n\r\n" + body + b"GET /healthz HTTP/1.1\r\nHost: loc"
    )
    await asyncio.gather(*state.tasks)
    connection.data_received(b"alhost\r\n\r\n")
    await asyncio.gather(*state.tasks)
    written = b"".join(call.args[0] for call in transport.write.mock_calls)
    assert written.count(b"HTTP/1.1 200 ") == 2
    assert not transport.close.called


async def test_a_reader_that_was_dropped_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its connection is aborted, although what was written before has not been taken."""
    caplog.set_level(logging.INFO, "headgate")
    server, dropped = Server(), asyncio.Event()
    send_stream = server.app._stream

    async def stream(*arguments: Any) -> None:
        await send_stream(*arguments)
        dropped.set()

    monkeypatch.setattr(server.app, "_stream", stream)
    tick = server.board.tick(server.live, 1)
    for number in range(3000):
        tick.totals[f"limiter {number} {'x' * 3000}"] = tick.totals["login"]
    monkeypatch.setattr("headgate.server.app.STALLED", 0.5)
    async with engine_of(server) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"\r\n")
        # Nothing more is read until the server has given up; then there is no end of the stream, only of the connection.
        await dropped.wait()
        received = await reader.read()
        writer.close()
    assert len(received) < 9_000_000
    assert not received.endswith(b"0\r\n\r\n")
    assert caplog.messages == ["a reader of events was dropped: it took nothing for 0.5 s"]


async def test_signals_are_handled_only_while_it_serves() -> None:
    before = signal.getsignal(signal.SIGTERM)
    async with engine_of(Server()):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
