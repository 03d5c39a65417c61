"""Limiters with one URL share the connections to a real server."""

from __future__ import annotations

import asyncio
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI

from headgate import AsyncLimiter, Limiter
from headgate.http.fastapi import install, limit
from headgate.policy import LivePolicy, parse_policy
from tests.integration.waiting import until
from tests.integration.worlds import World
from tests.unit.processes import forking, in_child


@pytest.fixture(params=["redis", "postgres"])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param, request.getfixturevalue(f"headgate_{request.param}_url"))


async def test_twenty_routes_of_fastapi_use_one_connection_and_one_breaker(world: World) -> None:
    app = FastAPI()
    install(app)
    limits = [limit("2/hour", name=secrets.token_hex(8), store=world.named_url) for _ in range(20)]
    for number, each in enumerate(limits):
        app.get(f"/{number}", dependencies=[Depends(each)])(lambda: "done")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for _ in range(2):
            responses = await asyncio.gather(*(client.get(f"/{number}") for number in range(20)))
            assert {response.status_code for response in responses} == {200}
        assert world.connections() == 1
        assert len({each.limiter.store for each in limits}) == 1
        for each in limits[1:]:
            await each.limiter.aclose()
        assert (await client.get("/0")).status_code == 429
        await limits[0].limiter.aclose()
    await asyncio.to_thread(until, lambda: world.connections() == 0)


def test_threads_of_limiters_and_a_policy_use_one_connection(world: World) -> None:
    name = secrets.token_hex(8)
    policy = parse_policy(f'[limiters."{name}"]\nrules = ["3/hour"]\nstore = "{world.named_url}"\n')
    limiter = Limiter("3/hour", name=name, store=world.named_url, on_store_error="raise")
    with LivePolicy(policy) as live:
        assert live[name].hit("ada")
        assert limiter.hit("ada")
        assert world.connections() == 1
        limiter.close()
        assert live[name].hit("ada")
        assert not live[name].hit("ada")
    until(lambda: world.connections() == 0)
    with Limiter("4/hour", name=name, store=world.named_url, on_store_error="raise") as again:
        assert again.hit("ada")
        assert not again.hit("ada")


def test_two_event_loops_share_a_store_and_close_it_in_turn(world: World) -> None:
    name, both_connected, first_closed = secrets.token_hex(8), threading.Barrier(3), threading.Event()

    async def first() -> Any:
        async with AsyncLimiter(
            "9/hour", name=name, store=world.named_url, on_store_error="raise"
        ) as limiter:
            assert await limiter.hit("ada")
            await asyncio.to_thread(both_connected.wait, 60)
            return limiter.store

    async def second() -> Any:
        async with AsyncLimiter(
            "9/hour", name=name, store=world.named_url, on_store_error="raise"
        ) as limiter:
            assert await limiter.hit("ada")
            await asyncio.to_thread(both_connected.wait, 60)
            await asyncio.to_thread(first_closed.wait, 60)
            assert await limiter.hit("ada")
            return limiter.store

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.submit(asyncio.run, first()), pool.submit(asyncio.run, second())
        both_connected.wait(60)
        store = one.result(60)
        until(lambda: world.connections() == 1)
        assert not store.is_closed
        first_closed.set()
        assert other.result(60) is store
    assert store.is_closed
    until(lambda: world.connections() == 0)


@forking
def test_child_process_does_not_close_the_store_of_its_parent(world: World) -> None:
    name = secrets.token_hex(8)

    def work() -> bool:
        with Limiter("9/hour", name=name, store=world.named_url, on_store_error="raise") as own:
            shares = own.store is inherited.store
            right = bool(own.hit("ada")) and bool(inherited.hit("ada"))
        inherited.close()
        closed: bool = inherited.store.is_closed  # type: ignore[attr-defined]
        return shares and right and closed

    with Limiter("9/hour", name=name, store=world.named_url, on_store_error="raise") as inherited:
        assert inherited.hit("ada")
        assert in_child(work)
        assert inherited.hit("ada").remaining == 5
        assert world.connections() == 1
