"""Servers for these tests: shared ones to count on, and ones of a test's own to break."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
import redis

from headgate.testing.servers import Kind, RedisServer
from tests.integration.redis.proxy import Proxy


@pytest.fixture(scope="session", params=["redis", "valkey"])
def url(request: pytest.FixtureRequest) -> str:
    """A server that all tests share; each is to count under a name of its own."""
    found: str = request.getfixturevalue(f"headgate_{request.param}_url")
    return found


@pytest.fixture
def name() -> str:
    """A name for a limiter that nobody else has."""
    return secrets.token_hex(8)


@pytest.fixture
def client(url: str) -> Iterator[redis.Redis]:
    """A plain client, to look behind the scenes."""
    with redis.Redis.from_url(url) as client:
        yield client


@pytest.fixture(params=["redis", "valkey"])
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server of the test's own, which it may kill."""
    kind: Kind = request.param
    with RedisServer(kind) as server:
        yield server


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[Proxy]:
    """A way to that server which can be cut."""
    with Proxy(server.port) as proxy:
        yield proxy
