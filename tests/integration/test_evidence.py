"""Evidence of an outage on real servers, from threads and from tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from headgate import AsyncLimiter, Limiter
from headgate.stores.postgres import PostgresStore, migrate
from headgate.stores.redis import RedisStore
from headgate.testing.postgres_server import PostgresServer
from headgate.testing.servers import RedisServer
from tests.unit.flavours import done

Flavour = type[Limiter] | type[AsyncLimiter]
AnyServer = RedisServer | PostgresServer
PATIENCE = 60.0
"""Seconds; only a failing test waits until the end."""


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[[str], AnyServer]]:
    with RedisServer() as redis, PostgresServer() as postgres:
        migrate(postgres.url)
        yield lambda kind: redis if kind == "redis" else postgres


@pytest.fixture(params=["redis", "postgres"])
def server(request: pytest.FixtureRequest, servers: Callable[[str], AnyServer]) -> AnyServer:
    return servers(request.param)


@pytest.fixture(params=[Limiter, AsyncLimiter], ids=["threads", "tasks"])
def flavour(request: pytest.FixtureRequest) -> Flavour:
    kind: Flavour = request.param
    return kind


def store_on(server: AnyServer, deadline: float) -> RedisStore | PostgresStore:
    kind = RedisStore if isinstance(server, RedisServer) else PostgresStore
    return kind(server.url, deadline=deadline)


async def until(condition: Callable[[], bool]) -> None:
    """Return when a condition is true, without calling a limiter."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  # whatever it depends on has no event
            await asyncio.sleep(0.01)


async def test_short_deadline_affects_only_its_own_call(server: AnyServer, flavour: Flavour) -> None:
    async with store_on(server, PATIENCE) as store:
        tight = flavour("1000/hour", name="tight", store=store, deadline=0.003)
        closed = flavour("1000/hour", name="closed", store=store, on_store_error="closed")
        await done(tight.ping())
        await done(closed.hit("alice"))
        server.pause()
        try:
            for _ in range(3):
                assert (await done(tight.hit("alice"))).degraded
        finally:
            server.resume()
        assert tight.health.available
        assert tight.health.outages == 0
        for _ in range(20):
            assert not (await done(closed.hit("alice"))).degraded


@pytest.mark.usefixtures("deadlines")
async def test_hanging_server_is_detected_despite_a_short_deadline(
    server: AnyServer, flavour: Flavour
) -> None:
    async with store_on(server, 0.2) as store:
        limiter = flavour("1000/hour", name="tight", store=store, deadline=0.003)
        await done(limiter.ping())
        server.pause()
        try:
            # One call may not be enough: if this process is late to send it, it says nothing about the server.
            async with asyncio.timeout(PATIENCE):
                while limiter.health.available:
                    assert (await done(limiter.hit("alice"))).degraded
        finally:
            server.resume()
        await until(lambda: limiter.health.available)


@pytest.mark.parametrize("policy", ["open", "closed"])
async def test_idle_limiter_notices_that_its_server_is_back(
    server: AnyServer, flavour: Flavour, policy: str
) -> None:
    async with store_on(server, PATIENCE) as store:
        limiter = flavour("1000/hour", name="quiet", store=store, on_store_error=policy)  # type: ignore[arg-type]
        await done(limiter.hit("alice"))
        server.kill()
        # The connection may be found broken only by the second call.
        assert (await done(limiter.hit("alice"))).degraded
        assert not limiter.health.available
        await asyncio.to_thread(server.start)
        await until(lambda: limiter.health.available)
        assert limiter.health.failures == 1
        assert not (await done(limiter.hit("alice"))).degraded


async def test_closed_store_is_not_probed(server: AnyServer, flavour: Flavour) -> None:
    store = store_on(server, PATIENCE)
    limiter = flavour("1000/hour", name="closed store", store=store)
    await done(limiter.hit("alice"))
    await store.aclose()
    assert (await done(limiter.hit("alice"))).degraded
    assert not limiter.health.available
