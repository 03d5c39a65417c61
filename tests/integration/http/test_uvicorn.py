"""The middleware and the dependency behind a real server, over a socket of this machine."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import Depends, FastAPI, WebSocket
from fastapi.responses import StreamingResponse

from headgate.http import by_address
from headgate.http.asgi import RateLimitMiddleware
from headgate.http.fastapi import install, limit
from tests.integration.http.clients import is_complete, left


def application() -> Any:
    behind = by_address(proxies=["127.0.0.1"])
    app = FastAPI(dependencies=[Depends(limit("3/hour", address=behind))])
    install(app)

    @app.get("/")
    async def home() -> str:
        return "home"

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("broken")

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def pieces() -> AsyncIterator[bytes]:
            for number in range(100):
                yield b"%d," % number

        return StreamingResponse(pieces())

    @app.websocket("/echo")
    async def echo(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text(await websocket.receive_text())

    return RateLimitMiddleware(app, "100/minute", address=behind)  # type: ignore[arg-type]


class Server(uvicorn.Server):
    """A server that says when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """Start the server on a free port, and stop it afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = Server(uvicorn.Config(application(), log_level="critical", lifespan="on", loop="asyncio"))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        await server.up.wait()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        await serving


async def test_requests(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, headers={"x-forwarded-for": "198.51.100.1"}) as client:
        home, broken, stream = await client.get("/"), await client.get("/broken"), await client.get("/stream")
        refused = await client.get("/")
        nowhere = await client.get("/nowhere")
        other = await client.get("/", headers={"x-forwarded-for": "198.51.100.2"})
    assert [response.status_code for response in (home, broken, stream, refused, nowhere, other)] == [
        200,
        500,
        200,
        429,
        404,
        200,
    ]
    assert all(map(is_complete, (home, broken, stream, refused, nowhere, other)))
    assert stream.text == "".join(f"{number}," for number in range(100))
    assert refused.json()["violated-policies"] == ["per-hour"]
    assert left(nowhere) == {"per-minute": 95}


async def test_handshakes(url: str) -> None:
    statuses = [await request_websocket(url) for _ in range(4)]
    assert [status for status, _ in statuses] == [101, 101, 101, 429]
    assert all(b"\r\nratelimit-policy:" in head.lower() for _, head in statuses)
    assert b"\r\nretry-after:" in statuses[-1][1].lower()


async def request_websocket(url: str) -> tuple[int, bytes]:
    """Send a WebSocket handshake; return status and headers of the response."""
    port = int(url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    key = base64.b64encode(b"0123456789abcdef").decode()
    lines = [
        "GET /echo HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {key}",
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return int(head.split()[1]), head
