"""Decisions per second on a Redis server over loopback.

    python -m benchmarks.redis [--quick]

The floor is hand-written code without a library: redis-py and one EVALSHA of a GCRA script per decision. Every peer is
configured as its documentation recommends, on the same server, with redis-py; for asyncio, its pool has a connection for
each task.

The server is the one from `headgate[embedded]`, or the one at HEADGATE_TEST_REDIS_URL.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

from benchmarks.harness import Scale, Section, main
from benchmarks.network import (
    KINDS,
    LIMIT,
    OURS,
    Caller,
    headgate,
    headgate_async,
    measure_one,
    measure_tasks,
    measure_threads,
)

FLOOR = "floor: EVALSHA"
PEERS = ("limits", "throttled-py", "traffik")
HOUR_US = 3600 * 1_000_000
THREADS = 32
TASKS = {64: 3.0, 256: 4.5}
"""Minimum ratio of Headgate's decisions to those of the best peer, by number of tasks."""
MOST_CONNECTIONS = max(TASKS) + 1

GCRA = """
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local tat = tonumber(redis.call('GET', KEYS[1]) or now)
if tat < now then tat = now end
local new = tat + tonumber(ARGV[1])
if new - now > tonumber(ARGV[2]) then return {0, 0, new - now - tonumber(ARGV[2])} end
redis.call('SET', KEYS[1], string.format('%.0f', new), 'PX', math.ceil((new - now) / 1000))
return {1, math.floor((tonumber(ARGV[2]) - (new - now)) / tonumber(ARGV[1])), 0}
"""


def run(scale: Scale) -> Iterator[Section]:
    """Measure one synchronous client, then many threads, then tasks."""
    with server_url() as url:
        threads = {name: partial(build, url) for name, build in SYNC.items()}
        tasks = {name: partial(build, url) for name, build in ASYNC.items()}
        one = measure_one("Redis, one synchronous client", threads, 1, scale.calls // 5, scale.rounds)
        one.require("Redis, one synchronous client", 0.85, FLOOR)
        yield one.section
        title = f"Redis, {THREADS} threads"
        many = measure_threads(title, threads, THREADS, 1, scale.calls // 2, scale.rounds)
        many.require(title, 2.5, many.best("limits"))
        yield many.section
        for number, bound in TASKS.items():
            title = f"Redis, {number} tasks"
            crowd = measure_tasks(title, tasks, number, number, scale.calls // 2, scale.rounds)
            crowd.require(title, bound, crowd.best(*PEERS))
            yield crowd.section


@contextlib.contextmanager
def server_url() -> Iterator[str]:
    """Start a server within a block, and yield its address."""
    if given := os.environ.get("HEADGATE_TEST_REDIS_URL"):
        yield given
        return
    from headgate.testing.servers import RedisServer

    with RedisServer() as server:
        yield server.url


def evalsha(url: str) -> Caller:
    """Build the floor."""
    import redis

    client = redis.Redis.from_url(url)
    sha = client.script_load(GCRA)
    return Caller(lambda key: client.evalsha(sha, 1, f"floor:{key}", HOUR_US / LIMIT, HOUR_US), client.close)


async def evalsha_async(url: str) -> Caller:
    """Build the floor for tasks."""
    import redis.asyncio

    client = redis.asyncio.Redis.from_url(url, max_connections=MOST_CONNECTIONS)
    sha = await client.script_load(GCRA)
    return Caller(lambda key: client.evalsha(sha, 1, f"floor:{key}", HOUR_US / LIMIT, HOUR_US), client.aclose)


# https://limits.readthedocs.io/en/stable/storage.html#redis
_LIMITS = {
    "fixed_window": "FixedWindowRateLimiter",
    "sliding_window": "SlidingWindowCounterRateLimiter",
    "sliding_log": "MovingWindowRateLimiter",
}


def _quota(kind: str) -> str:
    return "1000 per 1 second" if kind == "sliding_log" else f"{LIMIT} per 1 hour"


def limits(kind: str, url: str) -> Caller:
    """Build limits."""
    from limits import parse, strategies
    from limits.storage import RedisStorage

    strategy = getattr(strategies, _LIMITS[kind])(RedisStorage(url))
    return Caller(partial(strategy.hit, parse(_quota(kind))))


async def limits_async(kind: str, url: str) -> Caller:
    """Build limits for tasks: https://limits.readthedocs.io/en/stable/async.html."""
    from limits import parse
    from limits.aio import strategies
    from limits.aio.storage import RedisStorage

    storage = RedisStorage(f"async+{url}", implementation="redispy", max_connections=MOST_CONNECTIONS)
    strategy = getattr(strategies, _LIMITS[kind])(storage)
    return Caller(partial(strategy.hit, parse(_quota(kind))))


# https://throttled-py.readthedocs.io/en/latest/quickstart/store-backends.html#redis
def _throttle(package: Any, kind: str, url: str, options: dict[str, Any]) -> Caller:
    throttle = package.Throttled(
        using=kind,
        quota=package.per_duration(timedelta(hours=1), LIMIT, LIMIT),
        store=package.RedisStore(server=url, options=options),
    )
    return Caller(throttle.limit)


def throttled(kind: str, url: str) -> Caller:
    """Build throttled-py."""
    import throttled as package

    return _throttle(package, kind, url, {})


async def throttled_async(kind: str, url: str) -> Caller:
    """Build throttled-py for tasks, with the documented options of the pool."""
    import throttled.asyncio as package

    pool = {"CONNECTION_POOL_KWARGS": {"max_connections": MOST_CONNECTIONS}}
    return _throttle(package, kind, url, pool)


# https://traffik.readthedocs.io (README, "Redis Backend" and "Strategies"); its default strategy is the fixed window.
async def traffik(url: str) -> Caller:
    """Build traffik, which has no synchronous API."""
    import redis.asyncio
    from traffik.backends.redis import RedisBackend
    from traffik.rates import Rate
    from traffik.strategies import FixedWindowStrategy

    async def connect() -> Any:
        return redis.asyncio.Redis.from_url(url, max_connections=MOST_CONNECTIONS)

    backend = RedisBackend(connection=connect, namespace="traffik", persistent=True)
    await backend.initialize()
    strategy, rate = FixedWindowStrategy(), Rate(limit=LIMIT, hours=1)
    return Caller(lambda key: strategy(key, rate, backend), backend.close)


THROTTLED = [kind for kind in KINDS if kind != "sliding_log"]
SYNC: dict[str, Callable[[str], Caller]] = {
    FLOOR: evalsha,
    **{name: partial(headgate, kind) for kind, name in OURS.items()},
    **{f"limits: {kind}": partial(limits, kind) for kind in _LIMITS},
    **{f"throttled-py: {kind}": partial(throttled, kind) for kind in THROTTLED},
}
ASYNC: dict[str, Callable[[str], Awaitable[Caller]]] = {
    FLOOR: evalsha_async,
    **{name: partial(headgate_async, kind) for kind, name in OURS.items()},
    **{f"limits: {kind}": partial(limits_async, kind) for kind in _LIMITS},
    **{f"throttled-py: {kind}": partial(throttled_async, kind) for kind in THROTTLED},
    "traffik: fixed_window": traffik,
}


if __name__ == "__main__":
    main("redis", __doc__, run)
