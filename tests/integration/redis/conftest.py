"""Servers for these tests: shared ones, and servers that a test may break."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from headgate.testing.servers import Kind, RedisServer


@pytest.fixture(scope="session", params=["redis", "valkey"])
def url(request: pytest.FixtureRequest) -> str:
    """A server that all tests share; each test uses a unique name."""
    found: str = request.getfixturevalue(f"headgate_{request.param}_url")
    return found


@pytest.fixture
def client(url: str) -> Iterator[redis.Redis]:
    """A plain client, to inspect the keys."""
    with redis.Redis.from_url(url) as client:
        yield client


@pytest.fixture(params=["redis", "valkey"])
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server for one test, which may kill it."""
    kind: Kind = request.param
    with RedisServer(kind) as server:
        yield server
