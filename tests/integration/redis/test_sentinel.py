"""A primary that is found through a sentinel, and found again when it has become another server."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.sentinel import Sentinel

from headgate import AsyncLimiter, Limiter, StoreUnavailable
from headgate.stores.redis import RedisStore
from headgate.testing.servers import RedisServer, answers_ping, find_binary, find_free_port


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.02)


@pytest.fixture
def successor(server: RedisServer) -> Iterator[RedisServer]:
    """A replica of the server, to be had before the sentinel, which looks for new ones only now and then."""
    with RedisServer(server.kind) as successor:
        successor.command("REPLICAOF", "127.0.0.1", str(server.port))
        until(lambda: b"state=online" in server.command("INFO", "replication"))
        yield successor


@pytest.fixture
def sentinel_port(server: RedisServer, tmp_path: Path) -> Iterator[int]:
    port = find_free_port()
    config = tmp_path / "sentinel.conf"
    config.write_text(f"port {port}\nbind 127.0.0.1\nsentinel monitor primary 127.0.0.1 {server.port} 1\n")
    with subprocess.Popen(
        [find_binary(server.kind), config, "--sentinel"], stdout=subprocess.DEVNULL, cwd=tmp_path
    ) as process:
        until(lambda: answers_ping(port))
        yield port
        process.kill()


@pytest.mark.parametrize("server", ["redis"], indirect=True)
def test_threads_find_the_primary_and_its_successor(successor: RedisServer, sentinel_port: int) -> None:
    client: Any = Sentinel([("127.0.0.1", sentinel_port)]).master_for("primary")
    with RedisStore(client) as store:
        limiter = Limiter("50/hour", name="x", store=store)
        assert limiter.hit("alice").remaining == 49
        with redis.Redis(port=sentinel_port) as sentinel:
            until(lambda: _fails_over(sentinel))
        until(lambda: b"role:master" in successor.command("INFO", "replication"))
        until(lambda: _counted_on(successor, limiter))
        assert not limiter.hit("alice").degraded


def _fails_over(sentinel: redis.Redis) -> bool:
    try:
        return bool(sentinel.execute_command("SENTINEL", "FAILOVER", "primary"))
    except redis.ResponseError:  # it has not heard of the replica yet
        return False


def _counted_on(server: RedisServer, limiter: Limiter) -> bool:
    """Return whether a hit is counted on a server: through the sentinel, and as its own clients see it."""
    with Limiter("50/hour", name="x", store=server.url, on_store_error="raise") as direct:
        try:
            before = direct.check("alice", 0).remaining
            decision = limiter.hit("alice")
        except StoreUnavailable:
            return False
        return not decision.degraded and direct.check("alice", 0).remaining == (before or 0) - 1


async def test_tasks_find_the_primary(sentinel_port: int) -> None:
    sentinel = AsyncSentinel([("127.0.0.1", sentinel_port)])
    client: Any = sentinel.master_for("primary")
    async with RedisStore(client) as store:
        limiter = AsyncLimiter("5/hour", name="x", store=store, on_store_error="raise")
        assert (await limiter.hit("alice")).remaining == 4
        assert (await limiter.hit("alice")).remaining == 3
    await client.aclose()
    for watcher in sentinel.sentinels:
        await watcher.aclose()
