"""Calls that wait during a round trip are sent together in the next one. The server counts the calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis

from headgate import AsyncLimiter, StoreConflict, StoreTimeout, token_bucket
from headgate.stores.redis import RedisStore
from headgate.stores.remote.batching import MOST_PER_BATCH
from headgate.stores.request import Request
from headgate.testing.servers import RedisServer


@pytest.fixture
def server_client(server: RedisServer) -> redis.Redis:
    return redis.Redis.from_url(server.url)


@pytest.fixture
async def store(server: RedisServer) -> AsyncIterator[RedisStore]:
    async with RedisStore(server.url, deadline=30) as store:
        yield store


def round_trips(client: redis.Redis) -> int:
    """Return how many calls of the script the server has counted."""
    stats: Any = client.info("commandstats")
    calls: int = stats.get("cmdstat_evalsha", {"calls": 0})["calls"]
    return calls


async def test_every_operation_is_one_round_trip(store: RedisStore, server_client: redis.Redis) -> None:
    limiter = AsyncLimiter("50/hour", "40/minute", token_bucket("100/day"), name="x", store=store)
    hold = await limiter.hold("alice", 2)
    for call in (
        limiter.hit("alice"),
        limiter.check("alice"),
        limiter.record("alice"),
        limiter.hold("alice"),
        hold.settle(1),
        limiter.reset("alice"),
    ):
        before = round_trips(server_client)
        await call
        assert round_trips(server_client) - before == 1


async def test_limiters_of_a_store_share_round_trips(store: RedisStore, server_client: redis.Redis) -> None:
    limiters = [AsyncLimiter("10/hour", name=f"limiter {i}", store=store) for i in range(10)]
    await limiters[0].hit("alice")
    before = round_trips(server_client)
    assert all(await asyncio.gather(*(limiter.hit("alice") for limiter in limiters)))
    assert round_trips(server_client) - before == 1


async def test_failing_request_does_not_fail_its_batch(store: RedisStore, server_client: redis.Redis) -> None:
    limiter = AsyncLimiter("5/hour", name="x", store=store, on_store_error="raise")
    await limiter.hit("bad")
    found: Any = server_client.keys("*bad*")
    server_client.delete(*found)
    server_client.lpush(found[0], "something else")
    keys = [*(f"user {i}" for i in range(15)), "bad", *(f"user {i}" for i in range(15, 30))]
    before = round_trips(server_client)
    answers = await asyncio.gather(*(limiter.hit(key) for key in keys), return_exceptions=True)
    assert round_trips(server_client) - before == 1
    assert isinstance(answers.pop(15), StoreConflict)
    assert all(answer for answer in answers if not isinstance(answer, BaseException))
    assert not any(isinstance(answer, BaseException) for answer in answers)


@pytest.mark.parametrize("callers", [8, 64])
async def test_scripts_lost_under_load_fail_no_call(
    store: RedisStore, server_client: redis.Redis, callers: int
) -> None:
    limiter = AsyncLimiter("10000/hour", name="x", store=store, on_store_error="raise")

    async def caller() -> None:
        for _ in range(20):
            await limiter.hit("alice")
            await asyncio.to_thread(server_client.script_flush)

    await asyncio.gather(*(caller() for _ in range(callers)))
    assert (await limiter.check("alice", 0)).remaining == 10_000 - 20 * callers


# --- Deadlines -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("deadlines")
async def test_hanging_server_fails_the_batch_and_all_queued_calls_together(server: RedisServer) -> None:
    """One timeout for all: queued calls do not wait for another one."""
    # Long enough to send within half of it on a busy machine; calls sent later say nothing about the server.
    async with RedisStore(server.url, deadline=2) as store:
        gate = store.bind_async("x", AsyncLimiter("5/hour").rules)
        await gate.decide(Request("hit", "warm"))
        server.pause()
        calls = [
            asyncio.ensure_future(gate.decide(Request("hit", f"user {i}"))) for i in range(3 * MOST_PER_BATCH)
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(answer) for answer in answers} == {StoreTimeout}
        assert len({id(answer) for answer in answers}) == len(answers)
        server.resume()
        assert (await gate.decide(Request("hit", "user 0")))[0]
        # Sent calls were counted; queued calls were not.
        counted = [
            (await gate.decide(Request("peek", f"user {i}", 0)))[0].remaining
            for i in (1, 3 * MOST_PER_BATCH - 1)
        ]
        assert counted == [4, 5]
