"""Servers of another kind than the URL says: that is said, and nothing is admitted for it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from headgate import (
    AsyncLimiter,
    Limiter,
    StoreMisconfigured,
    StoreOverloaded,
    StoreUnavailable,
)
from headgate.client import ServerStore
from headgate.stores.postgres import PostgresStore
from headgate.stores.redis import RedisStore
from headgate.testing.servers import RedisServer
from tests.unit.flavours import AnyLimiter, done

Flavour = type[Limiter] | type[AsyncLimiter]
CERTIFICATE = Path(__file__).parents[1] / "apps" / "mail" / "certificate.pem"
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
        ignore(self.request)


class PatientWebPage(socketserver.StreamRequestHandler):
    """Waits for the end of a line before it answers."""

    def handle(self) -> None:
        self.rfile.readline()
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
        ignore(self.request)


class Tls(socketserver.BaseRequestHandler):
    """Speaks TLS or not at all; but has no certificate."""

    def handle(self) -> None:
        if self.request.recv(1) == b"\x16":
            self.request.sendall(b"\x15\x03\x03\0\2\2\x28")
            ignore(self.request)


class Silent(socketserver.BaseRequestHandler):
    """Reads, and says nothing."""

    greeting = b""

    def handle(self) -> None:
        self.request.sendall(self.greeting)
        ignore(self.request)


class Ssh(Silent):
    greeting = b"SSH-2.0-OpenSSH_9.2\r\n"


class Mail(Silent):
    greeting = b"220 mail.example.org ESMTP\r\n"


class Mysql(Silent):
    greeting = b"J\0\0\0\n8.0.36\0"


class Within(socketserver.BaseRequestHandler):
    """Speaks TLS, and has a certificate."""

    answer = b""

    def handle(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(CERTIFICATE)
        with contextlib.suppress(OSError), context.wrap_socket(self.request, server_side=True) as within:
            within.recv(65536)
            within.sendall(self.answer)
            ignore(within)


class WebWithin(Within):
    answer = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"


class RedisWithin(Within):
    answer = b"-NOAUTH Authentication required.\r\n"


def ignore(connection: socket.socket) -> None:
    """Read what is sent: to hang up on what is unread would take the answer back."""
    with contextlib.suppress(OSError):
        while connection.recv(65536):
            pass


class AnyServer(socketserver.ThreadingTCPServer):
    daemon_threads = True


HANDLERS: dict[str, type[socketserver.BaseRequestHandler]] = {
    "web": WebPage,
    "patient": PatientWebPage,
    "tls": Tls,
    "silent": Silent,
    "ssh": Ssh,
    "mail": Mail,
    "mysql": Mysql,
    "web within TLS": WebWithin,
    "Redis within TLS": RedisWithin,
}


@pytest.fixture(scope="module")
def places(headgate_redis_url: str, headgate_postgres_server: str) -> Iterator[dict[str, str]]:
    """Where the servers are, each by its kind."""
    found = {
        "redis": urlsplit(headgate_redis_url).netloc,
        "postgres": urlsplit(headgate_postgres_server).netloc.rpartition("@")[2],
    }
    with contextlib.ExitStack() as stack:
        for kind, handler in HANDLERS.items():
            server = stack.enter_context(AnyServer(("127.0.0.1", 0), handler))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            found[kind] = f"127.0.0.1:{server.server_address[1]}"
        guarded = stack.enter_context(RedisServer(options=("--requirepass", "secret")))
        found["guarded"] = f"127.0.0.1:{guarded.port}"
        yield found


@pytest.fixture(params=[Limiter, AsyncLimiter], ids=["sync", "async"])
def flavour(request: pytest.FixtureRequest) -> Flavour:
    kind: Flavour = request.param
    return kind


AnyStore = RedisStore | PostgresStore | ServerStore


URLS = {
    "redis": "redis://{}",
    "rediss": "rediss://{}",
    "rediss, trusting": f"rediss://{{}}?ssl_ca_certs={CERTIFICATE}",
    "cluster": "redis+cluster://{}",
    "sentinel": "redis+sentinel://{}/primary",
    "postgresql": "postgresql://ann@{}/limits",
    "postgresql without TLS": "postgresql://ann@{}/limits?sslmode=disable",
    "postgresql with TLS": "postgresql://ann@{}/limits?sslmode=require",
    "postgresql within TLS": "postgresql://ann@{}/limits?sslmode=require&sslnegotiation=direct",
    "http": "http://{}",
    "https": "https://{}",
}


def store_at(url: str, deadline: float = PATIENCE) -> AnyStore:
    kinds: dict[str, type[AnyStore]] = {
        "postgresql": PostgresStore,
        "http": ServerStore,
        "https": ServerStore,
    }
    return kinds.get(url.partition(":")[0], RedisStore)(url, deadline=deadline)


async def refused(store: AnyStore, flavour: Flavour, why: str | None = None) -> None:
    limiter = flavour("5/hour", name="x", store=store, on_store_error="open")
    for call in (limiter.ping, limiter.hit, limiter.hit):
        with pytest.raises(StoreMisconfigured, match=why):
            await done(call() if call == limiter.ping else call("alice"))
    assert limiter.health.outages == 0
    await store.aclose()


@pytest.mark.parametrize(
    ("kind", "urls", "what"),
    [
        ("web", ["redis", "rediss", "cluster", "sentinel", "https"], "a web server without TLS"),
        ("web", ["postgresql", "postgresql without TLS"], "a web server without TLS"),
        ("web", ["http"], "not as a Headgate server does"),
        ("patient", ["redis", "rediss", "cluster", "sentinel", "https"], "a web server without TLS"),
        ("postgres", ["redis", "rediss", "cluster", "sentinel", "http", "https"], "a PostgreSQL server"),
        ("redis", ["http"], "a Redis server without TLS"),
        ("redis", ["cluster"], "cluster support disabled"),
        ("redis", ["sentinel"], "no Sentinel"),
        ("ssh", ["redis", "rediss", "cluster", "sentinel", "https"], "an SSH server"),
        ("ssh", ["postgresql without TLS"], "an SSH server"),
        ("mail", ["redis", "rediss", "cluster", "sentinel", "https"], "a mail server"),
        ("mail", ["postgresql", "postgresql without TLS"], "a mail server"),
        ("mysql", ["redis", "rediss", "postgresql", "https"], "something that says .*8.0.36"),
        ("tls", ["redis", "cluster", "sentinel", "http"], "a server that speaks TLS"),
        ("tls", ["postgresql", "postgresql without TLS"], "a server that speaks TLS"),
        ("web within TLS", ["rediss", "rediss, trusting", "postgresql within TLS"], "a web server with TLS"),
        ("web within TLS", ["redis", "postgresql with TLS"], "a server that speaks TLS"),
        ("Redis within TLS", ["https", "postgresql within TLS"], "a Redis server with TLS"),
        ("Redis within TLS", ["rediss"], "certificate verify failed"),
        ("Redis within TLS", ["rediss, trusting"], "Authentication required"),
        ("postgres", ["postgresql within TLS"], "a PostgreSQL server without TLS"),
        ("postgres", ["postgresql with TLS"], "does not support SSL"),
    ],
)
async def test_a_server_of_another_kind_is_named(
    places: dict[str, str], kind: str, urls: list[str], what: str, flavour: Flavour
) -> None:
    for url in urls:
        await refused(store_at(URLS[url].format(places[kind])), flavour, what)


async def until_known(limiter: AnyLimiter) -> None:
    """Ping until that says more than that it did not work: a busy machine may not find out why in time."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with contextlib.suppress(StoreUnavailable, StoreOverloaded):
                await done(limiter.ping())


@pytest.mark.parametrize(
    ("url", "kind", "what"),
    [
        ("postgresql", "redis", "a Redis server without TLS"),
        ("postgresql without TLS", "guarded", "a Redis server without TLS"),
        ("postgresql with TLS", "redis", "a Redis server without TLS"),
        ("rediss", "redis", "a Redis server without TLS"),
        ("http", "guarded", "a Redis server without TLS"),
        ("postgresql", "patient", "a web server without TLS"),
        ("postgresql", "ssh", "an SSH server"),
        ("http", "ssh", "an SSH server"),
        ("http", "mail", "a mail server"),
    ],
)
async def test_a_server_that_waits_for_more_is_named(
    places: dict[str, str], url: str, kind: str, what: str, flavour: Flavour
) -> None:
    store = store_at(URLS[url].format(places[kind]), 0.2)
    limiter = flavour("5/hour", name="x", store=store, on_store_error="open")
    with pytest.raises(StoreMisconfigured, match=what):
        await until_known(limiter)
    await store.aclose()


# httpx leaves the socket of a handshake with TLS that is broken off to the garbage collector, so https:// is left out here.
@pytest.mark.parametrize("url", [url for url in URLS if url != "https"])
async def test_a_server_that_says_nothing_is_down(places: dict[str, str], url: str, flavour: Flavour) -> None:
    store = store_at(URLS[url].format(places["silent"]), 0.2)
    limiter = flavour("5/hour", name="x", store=store, on_store_error="open")
    assert (await done(limiter.hit("alice"))).degraded
    with pytest.raises((StoreUnavailable, StoreOverloaded)):  # the latter on a busy machine
        await done(limiter.ping())
    await store.aclose()


async def test_a_database_without_tls_is_not_asked_where_tls_is_wanted(
    headgate_postgres_server: str, flavour: Flavour
) -> None:
    await refused(store_at(f"{headgate_postgres_server}?sslmode=require"), flavour)
