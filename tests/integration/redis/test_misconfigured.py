"""Servers that are reachable but not usable: an error is raised, and nothing is admitted."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headgate import AsyncLimiter, ConfigError, Limiter, StoreError, StoreMisconfigured, fixed_window
from headgate.stores.redis import RedisStore
from headgate.stores.remote.batching import ENOUGH_TO_FOLLOW
from headgate.stores.request import Request
from headgate.testing.servers import RedisServer, answers_ping, find_binary, find_free_port
from tests.integration.redis.cluster import find_low_port
from tests.integration.waiting import until
from tests.unit.flavours import close, done

Flavour = type[Limiter] | type[AsyncLimiter]


@pytest.fixture(params=[Limiter, AsyncLimiter], ids=["sync", "async"])
def flavour(request: pytest.FixtureRequest) -> Flavour:
    kind: Flavour = request.param
    return kind


@contextmanager
def without_password(server: RedisServer) -> Iterator[str]:
    server.command("CONFIG", "SET", "requirepass", "s3cret")
    yield server.url


@contextmanager
def wrong_password(server: RedisServer) -> Iterator[str]:
    server.command("CONFIG", "SET", "requirepass", "s3cret")
    yield f"redis://:hunter2@127.0.0.1:{server.port}/0"


@contextmanager
def needless_password(server: RedisServer) -> Iterator[str]:
    yield f"redis://ann:hunter2@127.0.0.1:{server.port}/0"


@contextmanager
def no_right_to_scripts(server: RedisServer) -> Iterator[str]:
    server.command("ACL", "SETUSER", "ann", "on", ">hunter2", "~*", "+@all", "-evalsha", "-eval")
    yield f"redis://ann:hunter2@127.0.0.1:{server.port}/0"


@contextmanager
def no_right_to_our_keys(server: RedisServer) -> Iterator[str]:
    server.command("ACL", "SETUSER", "ann", "on", ">hunter2", "~other*", "+@all")
    yield f"redis://ann:hunter2@127.0.0.1:{server.port}/0"


@contextmanager
def replica(server: RedisServer) -> Iterator[str]:
    with RedisServer(server.kind) as other:
        other.command("REPLICAOF", "127.0.0.1", str(server.port))
        until(lambda: b"master_link_status:up" in other.command("INFO", "replication"))
        yield other.url


@contextmanager
def no_such_database(server: RedisServer) -> Iterator[str]:
    yield f"redis://127.0.0.1:{server.port}/9999"


@contextmanager
def cluster_node(server: RedisServer) -> Iterator[str]:
    options = ("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf")
    with RedisServer(server.kind, options, port=find_low_port()) as node:
        node.command("CLUSTER", "ADDSLOTS", "0")
        node.command("CLUSTER", "SET-CONFIG-EPOCH", "1")
        yield node.url.removesuffix("/0") + "/1"


@contextmanager
def sentinel(server: RedisServer, folder: Path) -> Iterator[str]:
    port = find_free_port()
    config = folder / "sentinel.conf"
    config.write_text(f"port {port}\nbind 127.0.0.1\nsentinel monitor primary 127.0.0.1 {server.port} 1\n")
    command = [find_binary(server.kind), config, "--sentinel"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=folder) as process:
        try:
            until(lambda: answers_ping(port))
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.kill()


WAYS = [
    without_password,
    wrong_password,
    needless_password,
    no_right_to_scripts,
    no_right_to_our_keys,
    replica,
    no_such_database,
    cluster_node,
]


@pytest.mark.parametrize("way", WAYS)
async def test_misconfiguration_at_the_start_raises(server: RedisServer, way: Any, flavour: Flavour) -> None:
    with way(server) as url:
        limiter = flavour("5/hour", name="x", store=url, on_store_error="open")
        for call in (limiter.ping, limiter.hit, limiter.hit):
            with pytest.raises(ConfigError) as raised:
                await done(call() if call == limiter.ping else call("alice"))
            assert isinstance(raised.value, StoreError)
            assert "hunter2" not in str(raised.value)
        assert limiter.health.outages == 0
        await close(limiter)


async def test_queued_batch_on_a_replica_is_not_an_outage(server: RedisServer) -> None:
    with RedisServer(server.kind) as other:
        async with RedisStore(other.url, deadline=60) as store:
            gate = store.bind_async("x", (fixed_window("5/hour"),))
            await gate.decide(Request("hit", "alice"))
            other.command("REPLICAOF", "127.0.0.1", str(server.port))
            other.pause()
            found = []
            for _ in range(2):
                found.append(
                    asyncio.gather(
                        *(gate.decide(Request("hit", "alice")) for _ in range(ENOUGH_TO_FOLLOW)),
                        return_exceptions=True,
                    )
                )
                for _ in range(10):
                    await asyncio.sleep(0)
            other.resume()
            errors = [error for batch in found for error in await batch]
            assert {type(error) for error in errors} == {StoreMisconfigured}


async def test_sentinel_as_server_is_a_misconfiguration(
    server: RedisServer, tmp_path: Path, flavour: Flavour
) -> None:
    with sentinel(server, tmp_path) as url:
        limiter = flavour("5/hour", name="x", store=url)
        with pytest.raises(ConfigError):
            await done(limiter.hit("alice"))
        await close(limiter)


async def test_later_misconfiguration_is_answered_by_the_failure_policy(
    server: RedisServer, flavour: Flavour, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisServer(server.kind) as primary:
        store = RedisStore(server.url)
        limiter = flavour("5/hour", name="x", store=store, on_store_error="closed")
        assert await done(limiter.hit("alice"))
        server.command("REPLICAOF", "127.0.0.1", str(primary.port))
        for _ in range(3):
            decision = await done(limiter.hit("alice"))
            assert not decision
            assert decision.degraded
        assert limiter.health.state == "misconfigured"
        assert [record.levelname for record in caplog.records].count("ERROR") == 1
        server.command("REPLICAOF", "NO", "ONE")
        assert not (await done(limiter.hit("alice"))).degraded
        assert limiter.health.state == "available"
        await store.aclose()


async def test_changed_password_is_detected(server: RedisServer, flavour: Flavour) -> None:
    store = RedisStore(server.url)
    limiter = flavour("5/hour", name="x", store=store)
    assert not (await done(limiter.hit("alice"))).degraded
    server.command("CONFIG", "SET", "requirepass", "s3cret")
    server.kill()
    server.options = ("--requirepass", "s3cret")
    server.start()
    # The first call may still find the old connection broken: a short outage.
    async with asyncio.timeout(30):
        while limiter.health.state != "misconfigured":
            assert (await done(limiter.hit("alice"))).degraded
            await asyncio.sleep(0)
    assert (await done(limiter.hit("alice"))).degraded
    assert limiter.health.state == "misconfigured"
    await store.aclose()


async def test_ping_of_a_non_redis_server_raises(headgate_postgres_server: str, flavour: Flavour) -> None:
    """PostgreSQL closes the connection on unknown input, so it looks like a server that is shutting down."""
    place = headgate_postgres_server.partition("@")[2].partition("/")[0]
    limiter = flavour("5/hour", name="x", store=f"redis://{place}", on_store_error="open")
    with pytest.raises(StoreError):
        await done(limiter.ping())
    await close(limiter)
