"""Decisions per second on a Redis server over loopback.

    python -m benchmarks.redis [--quick]

The floor is hand-written code without a library: redis-py and one EVALSHA of a GCRA script per decision; for asyncio, its
pool has a connection for each task.

The server is the one from `headgate[embedded]`, or the one at HEADGATE_TEST_REDIS_URL.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial

from benchmarks.harness import Scale, Section, main
from benchmarks.network import LIMIT, OURS, Caller, headgate, headgate_async, measure_one, measure_tasks

FLOOR = "floor: EVALSHA"
HOUR_US = 3600 * 1_000_000
TASKS = {64: 3.0, 256: 3.0}
"""Minimum ratio of Headgate's decisions to those of the floor, by number of tasks."""
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
    """Measure one synchronous client, then tasks."""
    with server_url() as url:
        sync = {
            FLOOR: partial(evalsha, url),
            **{name: partial(headgate, kind, url) for kind, name in OURS.items()},
        }
        tasks = {
            FLOOR: partial(evalsha_async, url),
            **{name: partial(headgate_async, kind, url) for kind, name in OURS.items()},
        }
        one = measure_one("Redis, one synchronous client", sync, 1, scale.calls // 5, scale.rounds)
        one.require("Redis, one synchronous client", 0.85, FLOOR)
        yield one.section
        for number, bound in TASKS.items():
            title = f"Redis, {number} tasks"
            crowd = measure_tasks(title, tasks, number, number, scale.calls // 2, scale.rounds)
            crowd.require(title, bound, FLOOR)
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


if __name__ == "__main__":
    main("redis", __doc__, run)
