"""The stream of figures."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from typing import Any
from unittest.mock import Mock

import pytest

from headgate.policy import parse_policy
from headgate_server import events
from headgate_server.app import DIRECT
from tests.server.support import POLICY, Server, started


class Reader:
    """Reads a stream as a browser does, piece by piece; it can stop reading, and go away."""

    def __init__(self, server: Server, method: str = "GET", *more: tuple[bytes, bytes]) -> None:
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.reads = asyncio.Event()
        self.reads.set()
        self.aborted = False
        self._leaves: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        scope = {
            "type": "http",
            "method": method,
            "path": "/v1/events",
            "raw_path": b"/v1/events",
            "headers": [(b"host", b"localhost"), *more],
            "server": ("127.0.0.1", 8080),
            "extensions": {DIRECT: Mock(abort=self._abort, reply=lambda *_: False)},
        }
        self.task = asyncio.ensure_future(server.app(scope, self._leaves.get, self._send))

    async def _send(self, message: Any) -> None:
        await self.reads.wait()
        await self.sent.put(message)

    def _abort(self) -> None:
        self.aborted = True
        self.leave()

    def leave(self) -> None:
        self._leaves.put_nowait({"type": "http.request"})
        self._leaves.put_nowait({"type": "http.disconnect"})

    async def begin(self) -> None:
        """Read all that comes at once."""
        for _ in range(4):
            await self.sent.get()

    async def event(self) -> tuple[str, Any]:
        """Return the name and data of the next event."""
        message = await self.sent.get()
        fields = dict(line.split(": ", 1) for line in message["body"].decode().split("\n") if line)
        return fields["event"], json.loads(fields["data"])


async def publish(server: Server, at: int) -> None:
    await server.app._tick(at)


async def test_history_comes_first_and_ticks_follow() -> None:
    server = Server()
    await publish(server, 100)
    await server.hit()
    reader = Reader(server)
    start = await reader.sent.get()
    assert start["status"] == 200
    assert (b"content-type", b"text/event-stream") in start["headers"]
    assert (b"x-accel-buffering", b"no") in start["headers"]  # or nginx would keep ticks back for minutes
    first = await reader.sent.get()
    assert first["body"] == b"retry: 1000\n\nevent: history\ndata: "
    assert json.loads((await reader.sent.get())["body"]) == {"ticks": [{"time": 100, "limiters": {}}]}
    assert (await reader.event())[1]["time"] == 100
    await publish(server, 101)
    name, tick = await reader.event()
    assert (name, tick["time"], tick["limiters"]["login"]["admitted"]) == ("tick", 101, 1)
    await publish(server, 102)
    assert (await reader.event())[1]["time"] == 102
    reader.leave()
    await reader.task


async def test_the_server_can_stop_and_readers_come_back() -> None:
    server = Server()
    reader = Reader(server)
    await reader.begin()
    server.app.end_streams()
    assert await reader.sent.get() == {"type": "http.response.body", "body": b""}
    await reader.task
    response = await server.client.get("/v1/events")
    assert response.status_code == 503
    assert response.headers["retry-after"]


async def test_slow_client_continues_with_the_newest_tick() -> None:
    server = Server()
    reader = Reader(server)
    await reader.begin()
    reader.reads.clear()
    for at in range(10, 20):
        await publish(server, at)
        await asyncio.sleep(0)
    reader.reads.set()
    times = [(await reader.event())[1]["time"] for _ in range(2)]
    assert times == [10, 19]
    reader.leave()
    await reader.task


async def test_number_of_open_streams_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of streams that are opened at once."""
    monkeypatch.setattr(events, "MAX_STREAMS", 2)
    server = Server()
    readers = [Reader(server) for _ in range(5)]
    statuses = [(await reader.sent.get())["status"] for reader in readers]
    assert sorted(statuses) == [200, 200, 503, 503, 503]
    opened = readers[statuses.index(200)]
    opened.leave()
    await opened.task
    readers.append(Reader(server))
    assert (await readers[-1].sent.get())["status"] == 200
    for reader in readers:
        reader.leave()
        await reader.task
    assert server.app._events._open == 0


async def test_removed_token_ends_its_streams() -> None:
    token = '[server.tokens.{0}]\nsha256 = "{1}"\nmay = ["decide"]\n'
    tokens = [token.format(name, sha256(name.encode()).hexdigest()) for name in ("stays", "goes")]
    server = Server(POLICY + "".join(tokens))
    stays, goes = (
        Reader(server, "GET", (b"authorization", f"Bearer {name}".encode())) for name in ("stays", "goes")
    )
    for reader in (stays, goes):
        await reader.begin()
    server.live._use(parse_policy(POLICY + tokens[0]))
    await publish(server, 1)
    assert (await stays.event())[0] == "tick"
    assert await goes.sent.get() == {"type": "http.response.body", "body": b""}
    await goes.task
    stays.leave()
    await stays.task


async def test_a_head_of_a_stream_ends_at_once() -> None:
    server = Server()
    reader = Reader(server, "HEAD")
    await reader.task
    assert reader.sent.qsize() == 2
    assert server.app._events._open == 0


async def test_ticks_come_by_themselves_while_the_application_runs() -> None:
    server = Server()
    async with started(server.app):
        reader = Reader(server)
        await reader.begin()
        first = (await reader.event())[1]["time"]
        assert (await reader.event())[1]["time"] == first + 1
    await reader.task


async def test_figures_continue_after_a_failed_second(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server()
    with monkeypatch.context() as broken:
        broken.setattr(server.statistics, "_snapshot", lambda live: 1 / 0)
        await publish(server, 1)
    assert "figures of this second are missing" in caplog.text
    await publish(server, 2)
    assert server.statistics.history.seconds.whole() == b'{"ticks":[{"time":2,"limiters":{}}]}'
