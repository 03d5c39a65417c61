"""Shared helpers for tests of applications: clients, and functions that parse our fields."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import http_sf
import httpx

ADDRESS = "192.0.2.1"
"""The address of clients in this process."""


@asynccontextmanager
async def client_of(app: Any, address: str = ADDRESS) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of an application in this process; an exception of the application is a 500."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(address, 1234))
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        yield client


def left(response: httpx.Response) -> dict[str, int]:
    """Return the remaining units of each policy, by name."""
    items: Any = http_sf.parse(response.headers["ratelimit"].encode(), tltype="list")
    return {name: parameters["r"] for name, parameters in items}


def policies(response: httpx.Response) -> dict[str, int]:
    """Return the quota of each policy, by name."""
    items: Any = http_sf.parse(response.headers["ratelimit-policy"].encode(), tltype="list")
    return {name: parameters["q"] for name, parameters in items}


def is_complete(response: httpx.Response) -> bool:
    """Return whether a response carries every field, once."""
    names = [name.lower() for name, _ in response.headers.multi_items()]
    wanted = {
        "ratelimit-policy",
        "ratelimit",
        "x-ratelimit-limit",
        "x-ratelimit-remaining",
        "x-ratelimit-reset",
    }
    if response.status_code == 429:
        wanted.add("retry-after")
    return all(names.count(name) == 1 for name in wanted)


async def connect(app: Any, path: str = "/echo", *, denial: bool = True, heard: bool = False) -> list[Any]:
    """Open a WebSocket, send one message, disconnect, and return all messages of the application.

    Args:
        app: The application.
        path: Where to.
        denial: Whether the server can answer a handshake with a response.
        heard: Whether to insist that a handshake is heard before it is answered.
    """
    incoming: list[Any] = [
        {"type": "websocket.connect"},
        {"type": "websocket.receive", "text": "hello"},
        {"type": "websocket.disconnect", "code": 1000},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return incoming.pop(0)

    async def send(message: Any) -> None:
        assert len(incoming) < 3 or not heard, "the handshake was answered before it was heard"
        sent.append(message)

    scope = {
        "type": "websocket",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "scheme": "ws",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"service")],
        "client": ("192.0.2.1", 1234),
        "server": ("service", 80),
        "subprotocols": [],
        "extensions": {"websocket.http.response": {}} if denial else {},
        "state": {},
    }
    await app(scope, receive, send)
    return sent


def response_of(messages: list[Any]) -> httpx.Response:
    """Return the response that a handshake was answered with."""
    start, *bodies = messages
    assert start["type"] == "websocket.http.response.start"
    assert {message["type"] for message in bodies} == {"websocket.http.response.body"}
    content = b"".join(message.get("body", b"") for message in bodies)
    return httpx.Response(start["status"], headers=start["headers"], content=content)
