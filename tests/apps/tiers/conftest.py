"""Servers and settings for the tests of the tiers service."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import redis
from redis.asyncio import Redis

from headgate.testing.servers import RedisServer
from headgate_services.tiers import setup_rate_limiting


@pytest.fixture(scope="session", params=["redis", "valkey"])
def any_url(request: pytest.FixtureRequest) -> str:
    """A server of either kind that all tests share; each test uses its own keys."""
    found: str = request.getfixturevalue(f"headgate_{request.param}_url")
    return found


@pytest.fixture
def key() -> str:
    """A key that nobody else has."""
    return f"user:{secrets.token_hex(8)}"


@pytest.fixture
def plain(any_url: str) -> Iterator[redis.Redis]:
    """A plain client, to read the state."""
    with redis.Redis.from_url(any_url, decode_responses=True) as client:
        yield client


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Redis]:
    """Provide a client like the service's, with a long time limit."""
    client = setup_rate_limiting(url, timeout=30)
    assert client is not None
    async with client:
        yield client


@pytest.fixture
async def client(any_url: str) -> AsyncIterator[Redis]:
    async with connected(any_url) as client:
        yield client


@pytest.fixture
async def other_client(any_url: str) -> AsyncIterator[Redis]:
    """The client of a second instance."""
    async with connected(any_url) as client:
        yield client


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server that the test may kill."""
    with RedisServer() as server:
        yield server
