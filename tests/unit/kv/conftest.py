"""Fixtures for all key-value stores."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from headgate.stores.kv import ListingKV, MemoryKV, SQLiteKV, purge
from headgate.stores.kv.cloudflare import CloudflareKV
from headgate.stores.kv.redis import RedisKV
from headgate.testing import FakeClock
from tests.unit.kv.cloudflare_server import ACCOUNT, NAMESPACE, TOKEN, CloudflareServer
from tests.unit.kv.http_server import served
from tests.unit.kv.redis_server import redis_url, with_own_prefix


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    with redis_url() as url:
        yield url


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(scope="session")
def cloudflare_at() -> Iterator[tuple[CloudflareServer, str]]:
    server = CloudflareServer()
    with served(server.app) as address:
        yield server, f"{address}/client/v4"


@pytest.fixture
def cloudflare(cloudflare_at: tuple[CloudflareServer, str], clock: FakeClock) -> CloudflareServer:
    server, _ = cloudflare_at
    server.start_over(clock)
    return server


@pytest.fixture
def cloudflare_base(cloudflare: CloudflareServer, cloudflare_at: tuple[CloudflareServer, str]) -> str:
    return cloudflare_at[1]


@pytest.fixture
async def redis_kv(redis_server: str) -> AsyncIterator[RedisKV]:
    kv = RedisKV.from_url(with_own_prefix(redis_server))
    yield kv
    await purge(kv)
    await kv.aclose()


@pytest.fixture
async def cloudflare_kv(cloudflare_base: str, clock: FakeClock) -> AsyncIterator[CloudflareKV]:
    kv = CloudflareKV(ACCOUNT, NAMESPACE, TOKEN, api_base=cloudflare_base, clock=clock)
    yield kv
    await kv.aclose()


@pytest.fixture
async def sqlite_kv(tmp_path: Path, clock: FakeClock) -> AsyncIterator[SQLiteKV]:
    kv = SQLiteKV(tmp_path / "kv.db", clock=clock)
    yield kv
    await kv.aclose()


@pytest.fixture(params=["memory", "sqlite", "redis", "cloudflare"])
def kv(request: pytest.FixtureRequest, clock: FakeClock) -> ListingKV:
    """Each key-value store in turn."""
    if request.param == "memory":
        return MemoryKV(clock=clock)
    found: ListingKV = request.getfixturevalue(f"{request.param}_kv")
    return found
