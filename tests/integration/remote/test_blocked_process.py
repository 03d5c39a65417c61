"""A process that is blocked for seconds during calls: its store is healthy, so no decision is made by policy."""

from __future__ import annotations

import asyncio
import ctypes
import secrets
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest

from headgate import AsyncLimiter, Decision, Limiter
from headgate.stores.postgres import PostgresStore
from headgate.stores.postgres.store import DEFAULT_DEADLINE as POSTGRES_DEADLINE
from headgate.stores.redis import RedisStore
from headgate.stores.redis.store import DEFAULT_DEADLINE as REDIS_DEADLINE

CALLS = 100
LIMIT = 50
PATIENT = 60.0

Store = RedisStore | PostgresStore


@pytest.fixture(params=["redis", "postgres"])
def make_store(request: pytest.FixtureRequest) -> Callable[[], Store]:
    """Return a function that makes a store with the default deadline, which other tests replace."""
    url = request.getfixturevalue(f"headgate_{request.param}_url")
    if request.param == "redis":
        return lambda: RedisStore(url, deadline=REDIS_DEADLINE)
    return lambda: PostgresStore(url, deadline=POSTGRES_DEADLINE)


def block_process() -> None:
    """Block all threads for 3 seconds: `PyDLL` keeps the interpreter locked."""
    ctypes.PyDLL(None).usleep(3_000_000)


def check(decisions: list[Decision], limiter: Limiter | AsyncLimiter) -> None:
    assert not any(decision.degraded for decision in decisions)
    assert sum(map(bool, decisions)) == LIMIT
    assert len(decisions) == CALLS
    health = limiter.health
    assert (health.outages, health.failures, health.overloads, health.degraded) == (0, 0, 0, 0)


STAGES = [(True, 1), (True, 3), (False, 1), (False, 3), (False, 5)]
"""Whether a connection is open, and turns of the event loop from the first call to the block."""


async def test_blocked_event_loop_is_not_an_outage(make_store: Callable[[], Store]) -> None:
    """The block finds every store in another stage of its calls."""
    async with AsyncExitStack() as stack:
        waiting, started = [], []
        for is_warm, turns in STAGES:
            store: Store = await stack.enter_async_context(make_store())
            limiter = AsyncLimiter(f"{LIMIT}/day", name=secrets.token_hex(8), store=store)
            if is_warm:
                await limiter.check("warm")
            waiting.append((turns, limiter))
        for left in range(5, 0, -1):
            for turns, limiter in waiting:
                if turns == left:
                    started.append((limiter, [asyncio.ensure_future(limiter.hit("a")) for _ in range(CALLS)]))
            await asyncio.sleep(0)
        block_process()
        for limiter, calls in started:
            check(await asyncio.gather(*calls), limiter)


def test_blocked_interpreter_is_not_an_outage(make_store: Callable[[], Store]) -> None:
    """The block finds one store connected and the other one connecting."""
    ready = threading.Barrier(2 * CALLS + 1)
    with make_store() as warm, make_store() as cold:
        limiters = [Limiter(f"{LIMIT}/day", name=secrets.token_hex(8), store=store) for store in (warm, cold)]
        limiters[0].check("warm")
        decisions: list[list[Decision]] = [[], []]

        def hit(which: int) -> None:
            ready.wait(PATIENT)
            decisions[which].append(limiters[which].hit("a"))

        threads = [threading.Thread(target=hit, args=(number % 2,)) for number in range(2 * CALLS)]
        for thread in threads:
            thread.start()
        ready.wait(PATIENT)
        block_process()
        for thread in threads:
            thread.join(PATIENT)
        for made, limiter in zip(decisions, limiters, strict=True):
            check(made, limiter)
