"""The commands of `headgate tiers`, which print their results."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from math import floor

from redis.asyncio import Redis
from redis.exceptions import RedisError

from headgate import ConfigError
from headgate.clock import MICROSECONDS
from headgate_services.common.starting import blocking
from headgate_services.tiers.backends import state_keys
from headgate_services.tiers.config import TiersSettings, load_settings
from headgate_services.tiers.keys import KeyTable, StoredKey
from headgate_services.tiers.limits import ANONYMOUS, SIGNED_IN, limits_by_tier
from headgate_services.tiers.middleware import setup_rate_limiting
from headgate_services.tiers.rate_limiter import TokenBucketRateLimiter


@blocking
async def inspect_caller(key: str) -> None:
    """Print the tokens of a caller, `user:ID` or `ip:ADDRESS`.

    Raises:
        ConfigError: The caller is invalid, or Redis or the database cannot be used.
    """
    settings = load_settings()
    limits = limits_by_tier(settings.saju_rate_limits)
    tier = await _tier_of(key, settings)
    limit = limits.get(tier, limits[ANONYMOUS])
    async with _redis(settings) as client:
        bucket = limit.bucket()
        limiter = TokenBucketRateLimiter(bucket.capacity, bucket.refill_rate, client)
        outcome = await limiter.take(key, cost=0)
    if outcome.backend == "memory":
        raise ConfigError("SAJU_REDIS_URL: Redis does not reply")
    print(
        f"{key}: tier {tier}, {limit.limit} per minute, {floor(outcome.remaining)} of {limit.capacity} left"
    )


@blocking
async def reset_caller(key: str) -> None:
    """Fill the bucket of a caller; raises like `inspect_caller`."""
    settings = load_settings()
    await _tier_of(key, settings)
    async with _redis(settings) as client:
        try:
            await client.delete(*state_keys(key))
        except RedisError as error:
            raise ConfigError(f"SAJU_REDIS_URL: {error}") from error


async def _tier_of(key: str, settings: TiersSettings) -> str:
    kind, _, name = key.partition(":")
    if kind not in ("user", "ip") or not name:
        raise ConfigError(f"invalid caller {key!r}; use user:ID or ip:ADDRESS")
    if kind == "ip":
        return ANONYMOUS
    async with _key_table(settings) as keys:
        tiers = {stored.user_id: stored.tier for stored in await keys.list()}
    return tiers.get(name, SIGNED_IN)


@asynccontextmanager
async def _redis(settings: TiersSettings) -> AsyncIterator[Redis]:
    if not settings.saju_redis_url:
        raise ConfigError(
            "SAJU_REDIS_URL: buckets in the memory of the service cannot be reached by a command; use a Redis, like redis://localhost"
        )
    client = setup_rate_limiting(settings.saju_redis_url, timeout=settings.saju_redis_timeout)
    assert client is not None
    async with client:
        yield client


@blocking
async def create_key(user_id: str, tier: str | None = None) -> None:
    """Create a key for a user and print it; it cannot be shown again.

    Raises:
        ConfigError: The database cannot be used, or the id or the tier is invalid.
    """
    settings = load_settings()
    async with _key_table(settings) as keys:
        created = await keys.create(user_id, tier)
    if created.user.tier not in limits_by_tier(settings.saju_rate_limits):
        print(f"Tier {created.user.tier!r} has no limit; the limit of {ANONYMOUS} applies.", file=sys.stderr)
    print(
        f"Key {created.id} of {created.user.id}, tier {created.user.tier}. It is shown only once.",
        file=sys.stderr,
    )
    print(created.key)


@blocking
async def list_keys() -> None:
    """Print all keys, without their secrets.

    Raises:
        ConfigError: The database cannot be used.
    """
    async with _key_table(load_settings()) as keys:
        stored = await keys.list()
    widest = max([len("USER"), *(len(key.user_id) for key in stored)])
    print(f"{'KEY':8}  {'USER':{widest}}  {'TIER':12}  {'CREATED':20}  REVOKED")
    for key in stored:
        print(_line(key, widest))


@blocking
async def revoke_key(key_id: str) -> int:
    """Revoke a key; return 1 if there is no valid key with this id.

    Raises:
        ConfigError: The database cannot be used.
    """
    async with _key_table(load_settings()) as keys:
        revoked = await keys.revoke(key_id)
    if not revoked:
        print(f"There is no valid key with the id {key_id!r}.", file=sys.stderr)
        return 1
    print(f"Key {key_id} is revoked.", file=sys.stderr)
    return 0


@asynccontextmanager
async def _key_table(settings: TiersSettings) -> AsyncIterator[KeyTable]:
    async with aclosing(KeyTable(settings.database_url, timeout=settings.database_timeout)) as keys:
        await keys.prepare()
        yield keys


def _line(key: StoredKey, widest: int) -> str:
    revoked = "-" if key.revoked_at is None else _moment(key.revoked_at)
    return f"{key.id:8}  {key.user_id:{widest}}  {key.tier:12}  {_moment(key.created_at)}  {revoked}"


def _moment(microseconds: int) -> str:
    return datetime.fromtimestamp(microseconds // MICROSECONDS, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
