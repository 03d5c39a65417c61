"""Detection of servers that may evict keys.

All keys of the store expire, so every `maxmemory-policy` except `noeviction` may evict them, including the `volatile-`
policies. An evicted key resets a limit. Without `maxmemory` nothing is evicted.
"""

from __future__ import annotations

import asyncio
import logging

from redis.exceptions import RedisError

from headgate.stores.redis.codec import command
from headgate.stores.redis.endpoint import RedisEndpoint

logger = logging.getLogger("headgate")

_INFO = [command(b"INFO", b"memory")]


def read_policy(endpoint: RedisEndpoint, deadline: float) -> str | None:
    """Return the server's eviction policy; empty if it never evicts, `None` if unknown."""
    connection = endpoint.connection(deadline)
    try:
        connection.connect()
        connection.send_packed_command(_INFO, check_health=False)
        return parse(connection.read_response(disable_decoding=True))
    except (RedisError, OSError) as error:
        _explain(endpoint, error)
        return None
    finally:
        connection.disconnect()


async def read_policy_async(endpoint: RedisEndpoint, deadline: float) -> str | None:
    """Like `read_policy`, for coroutines."""
    connection = endpoint.async_connection(deadline)
    try:
        async with asyncio.timeout(deadline):
            await connection.connect()
            await connection.send_packed_command(_INFO, check_health=False)
            return parse(await connection.read_response(disable_decoding=True))
    except (RedisError, OSError) as error:
        _explain(endpoint, error)
        return None
    finally:
        await connection.disconnect(nowait=True)


def parse(info: bytes) -> str | None:
    """Return the policy from the reply to `INFO memory`, like `read_policy`."""
    figures = dict(line.partition(b":")[::2] for line in info.splitlines())
    policy, room = figures.get(b"maxmemory_policy"), figures.get(b"maxmemory")
    if policy is None or room is None:
        return None
    return "" if policy == b"noeviction" or int(room) == 0 else policy.decode("ascii", "replace")


def _explain(endpoint: RedisEndpoint, error: Exception) -> None:
    # Some providers forbid the command; the store may work nevertheless.
    logger.debug("%s: the eviction policy is unknown: %s", endpoint.name, endpoint.error(error))
