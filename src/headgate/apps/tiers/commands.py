"""What `headgate tiers keys` does: plain functions that print, and return an exit code."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from headgate.apps.tiers.config import Settings, load_settings
from headgate.apps.tiers.keys import KeyTable, StoredKey
from headgate.apps.tiers.limits import ANONYMOUS, limits_by_tier
from headgate.clock import MICROSECONDS


def create_key(user_id: str, tier: str | None = None) -> int:
    """Make a key for a user and print it; it is not shown again.

    Raises:
        ConfigError: The database cannot be used, or the id or tier is no name.
    """
    return asyncio.run(_create_key(user_id, tier))


def list_keys() -> int:
    """Print all keys, without what could be used of them.

    Raises:
        ConfigError: The database cannot be used.
    """
    return asyncio.run(_list_keys())


def revoke_key(key_id: str) -> int:
    """End a key, from the next request on; 1 if there is none with this id that is still good.

    Raises:
        ConfigError: The database cannot be used.
    """
    return asyncio.run(_revoke_key(key_id))


async def _create_key(user_id: str, tier: str | None) -> int:
    settings = load_settings()
    async with _key_table(settings) as keys:
        created = await keys.create(user_id, tier)
    if created.user.tier not in limits_by_tier(settings.rate_limits):
        print(
            f"No limit is set for tier {created.user.tier!r}: that of {ANONYMOUS} applies.", file=sys.stderr
        )
    print(
        f"Key {created.id} of {created.user.id}, tier {created.user.tier}; it is shown only now.",
        file=sys.stderr,
    )
    print(created.key)
    return 0


async def _list_keys() -> int:
    async with _key_table(load_settings()) as keys:
        stored = await keys.list()
    widest = max([len("USER"), *(len(key.user_id) for key in stored)])
    print(f"{'KEY':8}  {'USER':{widest}}  {'TIER':12}  {'CREATED':20}  REVOKED")
    for key in stored:
        print(_line(key, widest))
    return 0


async def _revoke_key(key_id: str) -> int:
    async with _key_table(load_settings()) as keys:
        revoked = await keys.revoke(key_id)
    if not revoked:
        print(f"There is no good key with the id {key_id!r}.", file=sys.stderr)
        return 1
    print(f"Key {key_id} is revoked.", file=sys.stderr)
    return 0


@asynccontextmanager
async def _key_table(settings: Settings) -> AsyncIterator[KeyTable]:
    keys = KeyTable(settings.database, timeout=settings.database_timeout)
    try:
        await keys.prepare()
        yield keys
    finally:
        await keys.aclose()


def _line(key: StoredKey, widest: int) -> str:
    revoked = "-" if key.revoked_at is None else _moment(key.revoked_at)
    return f"{key.id:8}  {key.user_id:{widest}}  {key.tier:12}  {_moment(key.created_at)}  {revoked}"


def _moment(microseconds: int) -> str:
    return datetime.fromtimestamp(microseconds // MICROSECONDS, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
