"""A server that may evict our keys causes a warning."""

from __future__ import annotations

import pytest

from headgate.stores.redis import RedisStore
from headgate.stores.redis.eviction import read_policy
from headgate.testing.servers import RedisServer
from tests.unit.flavours import Flavour, done


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_policy_that_may_evict_our_keys_causes_a_warning(
    server: RedisServer, flavour: Flavour, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Policies that evict only keys with an expiry also warn: all our keys expire."""
    server.command("CONFIG", "SET", "maxmemory", "100mb")
    server.command("CONFIG", "SET", "maxmemory-policy", policy)
    async with RedisStore(server.url) as store:
        assert "unless its maxmemory-policy" in store.guarantees.may_lose
        limiter = flavour("5/hour", name="x", store=store)
        await done(limiter.ping())
        await done(limiter.ping())
        assert f"at any time, because its maxmemory-policy is {policy}" in store.guarantees.may_lose
    assert [record.getMessage().count(policy) for record in caplog.records] == [1]


@pytest.mark.parametrize(("policy", "room"), [("noeviction", "100mb"), ("allkeys-lru", "0")])
async def test_policy_without_eviction_causes_no_warning(
    server: RedisServer, flavour: Flavour, policy: str, room: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.command("CONFIG", "SET", "maxmemory", room)
    server.command("CONFIG", "SET", "maxmemory-policy", policy)
    async with RedisStore(server.url) as store:
        await done(flavour("5/hour", name="x", store=store).ping())
        assert "at any time" not in store.guarantees.may_lose
    assert not caplog.records


async def test_ping_succeeds_without_the_right_to_info(server: RedisServer, flavour: Flavour) -> None:
    server.command("ACL", "SETUSER", "ann", "on", ">hunter2", "~*", "+@all", "-info")
    async with RedisStore(f"redis://ann:hunter2@127.0.0.1:{server.port}") as store:
        await done(flavour("5/hour", name="x", store=store).ping())
        assert "unless its maxmemory-policy" in store.guarantees.may_lose


def test_reply_without_eviction_settings_is_ignored() -> None:
    assert read_policy(b"# Memory\r\nused_memory:1\r\n") is None
