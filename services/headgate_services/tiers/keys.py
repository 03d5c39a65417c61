"""API keys and the tiers of their users.

A key is 256 random bits as text, shown once when it is created; the table has only its SHA-256. A slow hash such as scrypt
is for secrets that can be guessed, which 256 random bits cannot, and would be too slow for a lookup on every request.
"""

from __future__ import annotations

import re
import secrets
from hashlib import sha256
from typing import Any, NamedTuple

from sqlalchemy import URL, text

from headgate import ConfigError
from headgate.clock import Clock, WallClock
from headgate_services.common.databases import SqlDatabase
from headgate_services.common.deadlines import DEFAULT_LIMIT
from headgate_services.tiers.limits import SIGNED_IN

PREFIX = "hg_"
LONGEST_USER_ID = 200
_KEY = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{43}}")

_FIND = """
    SELECT tier_users.id, tier_users.tier FROM tier_keys JOIN tier_users ON tier_users.id = tier_keys.user_id
    WHERE tier_keys.digest = :digest AND tier_keys.revoked_at IS NULL
"""
_ADD_USER = """
    INSERT INTO tier_users (id, tier) VALUES (:user_id, :tier)
    ON CONFLICT (id) DO UPDATE SET tier = CASE WHEN :is_given THEN excluded.tier ELSE tier_users.tier END
    RETURNING tier
"""
_ADD_KEY = """
    INSERT INTO tier_keys (id, digest, user_id, created_at) VALUES (:id, :digest, :user_id, :now)
"""
_LIST = """
    SELECT tier_keys.id, tier_users.id, tier_users.tier, tier_keys.created_at, tier_keys.revoked_at
    FROM tier_keys JOIN tier_users ON tier_users.id = tier_keys.user_id ORDER BY tier_keys.created_at, tier_keys.id
"""
_REVOKE = "UPDATE tier_keys SET revoked_at = :now WHERE id = :id AND revoked_at IS NULL"


class User(NamedTuple):
    """The owner of a key."""

    id: str
    tier: str


class NewKey(NamedTuple):
    """A new key; the secret `key` is not stored."""

    id: str
    key: str
    user: User


class StoredKey(NamedTuple):
    """The stored data of a key; times are in microseconds since the epoch."""

    id: str
    user_id: str
    tier: str
    created_at: int
    revoked_at: int | None


class KeyTable(SqlDatabase):
    """Keys in a database.

    Args:
        url: The URL of the database, with an asynchronous driver.
        clock: A clock for tests.
        timeout: Time limit of an operation on PostgreSQL, in seconds.
    """

    package = "headgate_services.tiers"
    record = "headgate_tier_migrations"

    def __init__(self, url: URL, clock: Clock | None = None, *, timeout: float = DEFAULT_LIMIT) -> None:
        super().__init__(url, timeout)
        self._clock = WallClock() if clock is None else clock

    async def find(self, key: str) -> User | None:
        """Return the owner of a key; `None` if the key is unknown or revoked."""
        if not _KEY.fullmatch(key):
            return None
        async with self.connection() as connection:
            found = (await connection.execute(text(_FIND), {"digest": digest_of(key)})).one_or_none()
        return None if found is None else User(*found)

    async def create(self, user_id: str, tier: str | None = None) -> NewKey:
        """Create a key for a user, and the user if they do not exist.

        Args:
            user_id: The user; all keys of a user share one bucket.
            tier: The new tier of the user; by default unchanged, or `free` for a new user.

        Raises:
            ConfigError: The id or the tier is invalid.
        """
        if not user_id or len(user_id) > LONGEST_USER_ID or not user_id.isprintable():
            raise ConfigError(f"invalid user id {user_id!r}; use 1 to {LONGEST_USER_ID} printable characters")
        if tier is not None and not re.fullmatch(r"[\w.-]{1,64}", tier):
            raise ConfigError(f"invalid tier {tier!r}; use a word such as 'pro'")
        key_id, key = secrets.token_hex(4), PREFIX + secrets.token_urlsafe(32)
        async with self.connection(writing=True) as connection:
            user = {"user_id": user_id, "tier": tier or SIGNED_IN, "is_given": tier is not None}
            stored_tier = (await connection.execute(text(_ADD_USER), user)).scalar_one()
            await connection.execute(
                text(_ADD_KEY),
                {"id": key_id, "digest": digest_of(key), "user_id": user_id, "now": self._clock.now_us()},
            )
        return NewKey(key_id, key, User(user_id, stored_tier))

    async def list(self) -> list[StoredKey]:
        """Return all keys, oldest first."""
        async with self.connection() as connection:
            return [StoredKey(*row) for row in await connection.execute(text(_LIST))]

    async def revoke(self, key_id: str) -> bool:
        """Revoke a key; return False if there is no valid key with this id."""
        async with self.connection(writing=True) as connection:
            result: Any = await connection.execute(text(_REVOKE), {"id": key_id, "now": self._clock.now_us()})
        return bool(result.rowcount)


def digest_of(key: str) -> str:
    """Return the stored digest of a key."""
    return sha256(key.encode()).hexdigest()
