"""Detection of servers that may evict keys.

All keys of the store expire, so every `maxmemory-policy` except `noeviction` may evict them, including the `volatile-`
policies. An evicted key resets a limit. Without `maxmemory` nothing is evicted.
"""

from __future__ import annotations

from headgate.stores.redis.codec import command
from headgate.stores.redis.peer import Command

INFO_MEMORY = Command(command(b"INFO", b"memory"))
"""The request whose reply has the policy."""


def read_policy(info: bytes) -> str | None:
    """Return the policy in the reply to `INFO memory`; empty if the server never evicts, `None` if unknown."""
    figures = dict(line.partition(b":")[::2] for line in info.splitlines())
    policy, room = figures.get(b"maxmemory_policy"), figures.get(b"maxmemory")
    if policy is None or room is None:
        return None
    return "" if policy == b"noeviction" or int(room) == 0 else policy.decode("ascii", "replace")
