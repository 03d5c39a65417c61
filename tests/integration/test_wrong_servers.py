"""Servers of another kind than the URL says: that is said, and nothing is admitted for it."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator

import pytest

from headgate import AsyncLimiter, Limiter, StoreMisconfigured
from headgate.client import ServerStore
from headgate.stores.postgres import PostgresStore
from headgate.stores.redis import RedisStore
from tests.unit.flavours import done

Flavour = type[Limiter] | type[AsyncLimiter]
PATIENCE = 60.0
"""Seconds; no test waits so long unless it fails."""


class WebPage(socketserver.BaseRequestHandler):
    """Answers whatever it is asked as a web server does that does not understand it."""

    def handle(self) -> None:
        self.request.recv(65536)
        self.request.sendall(
            b"HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 6\r\n\r\n<html>"
        )
        self.request.shutdown(socket.SHUT_WR)
        while self.request.recv(65536):  # to hang up on what is unread would take the answer back
            pass


class WebServer(socketserver.ThreadingTCPServer):
    daemon_threads = True


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    with WebServer(("127.0.0.1", 0), WebPage) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(params=[Limiter, AsyncLimiter], ids=["sync", "async"])
def flavour(request: pytest.FixtureRequest) -> Flavour:
    kind: Flavour = request.param
    return kind


AnyStore = RedisStore | PostgresStore | ServerStore


def store_at(url: str) -> AnyStore:
    kinds: dict[str, type[AnyStore]] = {
        "postgresql": PostgresStore,
        "http": ServerStore,
        "https": ServerStore,
    }
    return kinds.get(url.partition(":")[0], RedisStore)(url, deadline=PATIENCE)


async def refused(store: AnyStore, flavour: Flavour) -> None:
    limiter = flavour("5/hour", name="x", store=store, on_store_error="open")
    for call in (limiter.ping, limiter.hit, limiter.hit):
        with pytest.raises(StoreMisconfigured):
            await done(call() if call == limiter.ping else call("alice"))
    assert limiter.health.outages == 0
    await store.aclose()


@pytest.mark.parametrize(
    "url",
    [
        "redis://{}",
        "rediss://{}",
        "postgresql://ann@{}/limits",
        "postgresql://ann@{}/limits?sslmode=disable",
        "http://{}",
        "https://{}",
    ],
)
async def test_a_web_server_is_no_store(web: str, url: str, flavour: Flavour) -> None:
    await refused(store_at(url.format(web)), flavour)


async def test_a_database_without_tls_is_not_asked_where_tls_is_wanted(
    headgate_postgres_server: str, flavour: Flavour
) -> None:
    await refused(store_at(f"{headgate_postgres_server}?sslmode=require"), flavour)
