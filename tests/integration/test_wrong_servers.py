"""Servers of another kind than the URL says: an invalid reply is a misconfiguration, silence is an outage."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from headgate import StoreMisconfigured, StoreOverloaded, StoreUnavailable
from headgate.client import ServerStore
from headgate.stores.postgres import PostgresStore
from headgate.stores.redis import RedisStore
from tests.unit.flavours import Flavour, done

AnyStore = RedisStore | PostgresStore | ServerStore
PATIENCE = 60.0
"""Seconds; only a failing test waits until the end."""

URLS = {
    "redis": "redis://{}",
    "rediss": "rediss://{}",
    "cluster": "redis+cluster://{}",
    "sentinel": "redis+sentinel://{}/primary",
    "postgresql": "postgresql://ann@{}/limits",
    "postgresql without TLS": "postgresql://ann@{}/limits?sslmode=disable",
    "postgresql with TLS": "postgresql://ann@{}/limits?sslmode=require",
    "http": "http://{}",
    "https": "https://{}",
}


class Silent(socketserver.BaseRequestHandler):
    """Reads everything and never replies."""

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while self.request.recv(65536):
                pass


class Replying(Silent):
    """Replies once to any request."""

    reply = b""

    def handle(self) -> None:
        self.request.recv(65536)
        self.request.sendall(self.reply)
        with contextlib.suppress(OSError):  # the client has closed the connection
            self.request.shutdown(socket.SHUT_WR)
        super().handle()


class WebPage(Replying):
    reply = b"HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 6\r\n\r\n<html>"


class Mail(Replying):
    reply = b"220 mail.example.org ESMTP\r\n\r\n"


HANDLERS: dict[str, type[socketserver.BaseRequestHandler]] = {
    "web": WebPage,
    "mail": Mail,
    "silent": Silent,
}


@pytest.fixture(scope="module")
def places(headgate_redis_url: str, headgate_postgres_server: str) -> Iterator[dict[str, str]]:
    """Addresses of the servers, by kind."""
    found = {
        "redis": urlsplit(headgate_redis_url).netloc,
        "postgres": urlsplit(headgate_postgres_server).netloc.rpartition("@")[2],
    }
    with contextlib.ExitStack() as stack:
        for kind, handler in HANDLERS.items():
            server = stack.enter_context(socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler))
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            found[kind] = f"127.0.0.1:{server.server_address[1]}"
        yield found


def store_at(url: str, deadline: float = PATIENCE) -> AnyStore:
    kinds: dict[str, type[AnyStore]] = {
        "postgresql": PostgresStore,
        "http": ServerStore,
        "https": ServerStore,
    }
    return kinds.get(url.partition(":")[0], RedisStore)(url, deadline=deadline)


@pytest.mark.parametrize(
    ("kind", "urls", "message"),
    [
        ("web", ["redis", "cluster", "sentinel"], 'check the scheme, host and port .*got "H"'),
        ("web", ["postgresql", "postgresql with TLS"], "check the scheme, host and port .*negotiation: H"),
        ("web", ["postgresql without TLS"], "check the scheme, host and port .*received H"),
        ("web", ["rediss", "https"], "(?i)wrong.version.number"),
        ("web", ["http"], "not as a Headgate server does"),
        ("mail", ["redis", "cluster", "sentinel"], 'check the scheme, host and port .*got "2"'),
        ("mail", ["postgresql"], "check the scheme, host and port .*negotiation: 2"),
        ("mail", ["http"], "check the scheme, host and port .*b'220 mail"),
        ("redis", ["cluster"], "cluster support disabled"),
        ("redis", ["sentinel"], "no Sentinel"),
        ("postgres", ["postgresql with TLS"], "does not support SSL"),
    ],
)
async def test_invalid_reply_is_a_misconfiguration(
    places: dict[str, str], kind: str, urls: list[str], message: str, flavour: Flavour
) -> None:
    for url in urls:
        store = store_at(URLS[url].format(places[kind]))
        limiter = flavour("5/hour", name="x", store=store, on_store_error="open")
        for call in (limiter.ping, limiter.hit, limiter.hit):
            with pytest.raises(StoreMisconfigured, match=message):
                await done(call() if call == limiter.ping else call("alice"))
        assert limiter.health.outages == 0
        await store.aclose()


# httpx leaves the socket of an interrupted TLS handshake to the garbage collector, so https:// is left out here.
@pytest.mark.parametrize("url", [url for url in URLS if url != "https"])
async def test_a_server_that_never_replies_is_down(
    places: dict[str, str], url: str, flavour: Flavour
) -> None:
    store = store_at(URLS[url].format(places["silent"]), 0.2)
    limiter = flavour("5/hour", name="x", store=store, on_store_error="open")
    assert (await done(limiter.hit("alice"))).degraded
    with pytest.raises((StoreUnavailable, StoreOverloaded)):  # the latter on a busy machine
        await done(limiter.ping())
    await store.aclose()
