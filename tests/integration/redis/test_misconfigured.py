"""Servers that are reachable but not usable: an error is raised, and nothing is admitted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headgate import ConfigError, Limiter, StoreError, StoreMisconfigured, StoreUnavailable
from headgate.stores.redis import RedisStore
from headgate.testing.servers import RedisServer
from tests.integration.redis.cluster import find_low_port
from tests.integration.waiting import until
from tests.unit.flavours import Flavour, close, done


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
    server.command("CONFIG", "SET", "repl-diskless-sync-delay", "0")
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


SECRET, USER = "s3cr%25t-p%40ss", "some-user"
PLAIN = "s3cr%t-p@ss"


@pytest.mark.parametrize("login", [f":{SECRET}", f"default:{SECRET}", f"{USER}:{SECRET}"])
def test_credentials_never_appear_in_logs_or_exceptions(
    server: RedisServer, caplog: pytest.LogCaptureFixture, login: str
) -> None:
    caplog.set_level(logging.DEBUG)
    url = server.url.replace("//", f"//{login}@")
    server.command("CONFIG", "SET", "requirepass", "another-one")
    texts = []
    with Limiter("5/hour", name="x", store=url, on_store_error="raise") as limiter:
        texts += [repr(limiter), repr(limiter.store), repr(limiter.health)]
        with pytest.raises(StoreMisconfigured) as wrong_password:
            limiter.hit("alice")
        server.kill()
        with pytest.raises(StoreUnavailable) as not_there:
            limiter.hit("alice")
    for error in (wrong_password.value, not_there.value):
        seen: BaseException | None = error
        while seen is not None:
            texts.append(f"{seen!r} {seen}")
            seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    texts += [record.getMessage() for record in caplog.records]
    assert len(caplog.records) == 1
    for text in texts:
        assert PLAIN not in text
        assert SECRET not in text
        assert USER not in text


def test_correct_password_works(server: RedisServer) -> None:
    server.command("CONFIG", "SET", "requirepass", PLAIN)
    with Limiter(
        "5/hour", name="x", store=server.url.replace("//", f"//:{SECRET}@"), on_store_error="raise"
    ) as it:
        assert it.hit("alice").remaining == 4
