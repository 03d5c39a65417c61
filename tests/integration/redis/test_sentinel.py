"""A primary that is found through a sentinel, also after a failover."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.sentinel import Sentinel

from headgate import AsyncLimiter, ConfigError, Decision, Limiter, StoreUnavailable
from headgate.stores.redis import RedisStore
from headgate.testing.servers import RedisServer, find_free_port
from tests.integration.redis.sentinel import fail_over, running_sentinel
from tests.integration.waiting import until

CALLERS = 8


@pytest.fixture
def new_primary(server: RedisServer) -> Iterator[RedisServer]:
    """A replica of the server; started before the sentinel, which looks for new replicas only rarely."""
    server.command("CONFIG", "SET", "repl-diskless-sync-delay", "0")
    with RedisServer(server.kind) as new_primary:
        new_primary.command("REPLICAOF", "127.0.0.1", str(server.port))
        until(lambda: b"state=online" in server.command("INFO", "replication"))
        yield new_primary


@pytest.fixture
def sentinel_port(server: RedisServer) -> Iterator[int]:
    with running_sentinel(server) as port:
        yield port


@pytest.fixture
def url(sentinel_port: int) -> str:
    """A URL with an unreachable sentinel before the real one."""
    return f"redis+sentinel://127.0.0.1:{find_free_port()},127.0.0.1:{sentinel_port}/primary/0"


def counted_on(server: RedisServer, limiter: Limiter) -> bool:
    """Return whether a hit is counted on a server: through the sentinel, and as its own clients see it."""
    with Limiter("50/hour", name="x", store=server.url, on_store_error="raise") as direct:
        try:
            before = direct.check("alice", 0).remaining
            decision = limiter.hit("alice")
        except (StoreUnavailable, ConfigError):
            return False
        return not decision.degraded and direct.check("alice", 0).remaining == (before or 0) - 1


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_threads_find_the_old_and_the_new_primary(new_primary: RedisServer, sentinel_port: int) -> None:
    client: Any = Sentinel([("127.0.0.1", sentinel_port)]).master_for("primary")
    with RedisStore(client) as store:
        limiter = Limiter("50/hour", name="x", store=store)
        assert limiter.hit("alice").remaining == 49
        fail_over(sentinel_port, new_primary)
        until(lambda: counted_on(new_primary, limiter))
        assert not limiter.hit("alice").degraded


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


# --- By URL -----------------------------------------------------------------------------------------------------------


async def test_threads_and_tasks_find_the_same_primary_by_url(url: str) -> None:
    store = RedisStore(url, deadline=10)
    threads = Limiter("5/hour", name="x", store=store, on_store_error="raise")
    tasks = AsyncLimiter("5/hour", name="x", store=store, on_store_error="raise")
    threads.ping()
    await tasks.ping()
    assert threads.hit("alice").remaining == 4
    assert (await tasks.hit("alice")).remaining == 3
    await store.aclose()


@pytest.mark.parametrize("server", ["redis"], indirect=True)
async def test_unknown_primary_name_is_a_misconfiguration(sentinel_port: int) -> None:
    url = f"redis+sentinel://127.0.0.1:{sentinel_port}/secondary"
    unknown = pytest.raises(ConfigError, match="knows no primary named 'secondary'")
    with Limiter("5/hour", name="x", store=url) as threads, unknown:
        threads.hit("alice")
    async with AsyncLimiter("5/hour", name="x", store=url) as tasks:
        with unknown:
            await tasks.hit("alice")


def test_unreachable_sentinels_are_an_outage() -> None:
    url = f"redis+sentinel://127.0.0.1:{find_free_port()}/primary"
    with Limiter("5/hour", name="x", store=url) as limiter:
        assert limiter.hit("alice").degraded
        assert limiter.health.outages == 1


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_threads_under_load_follow_a_failover(new_primary: RedisServer, sentinel_port: int, url: str) -> None:
    with RedisStore(url, deadline=10) as store:
        limiter = Limiter("1000000/hour", name="x", store=store)
        limiter.ping()
        stop = threading.Event()
        failures: list[BaseException] = []

        def call() -> None:
            try:
                while not stop.is_set():
                    assert isinstance(limiter.hit("alice"), Decision)
            except BaseException as error:  # noqa: BLE001  # for the test to see
                failures.append(error)

        callers = [threading.Thread(target=call) for _ in range(CALLERS)]
        for caller in callers:
            caller.start()
        try:
            fail_over(sentinel_port, new_primary)
            until(lambda: _is_asked(new_primary) and limiter.health.available)
        finally:
            stop.set()
            for caller in callers:
                caller.join()
        assert not failures
        assert not limiter.hit("alice").degraded


def _is_asked(server: RedisServer) -> bool:
    """Return whether a server runs our script; replicas only receive the writes of their primary."""
    return b"cmdstat_evalsha" in server.command("INFO", "commandstats")
