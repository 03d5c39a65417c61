"""API keys: who a request is from, and which tier they have.

A key is 256 random bits as text, shown once when it is made. What is stored is its SHA-256: the table alone is of
no use. A slow hash such as scrypt protects secrets that can be guessed; 2^256 cannot, however fast the hash, and what is
looked up on every request must not cost a tenth of a second.
"""

from __future__ import annotations

import re
import secrets
from hashlib import sha256
from importlib import resources
from typing import Any, NamedTuple

from sqlalchemy import URL, text

from headgate import ConfigError
from headgate.clock import Clock, WallClock
from headgate.migrations import read_migrations
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
    """Somebody whom a key belongs to."""

    id: str
    tier: str


class NewKey(NamedTuple):
    """A key that has just been made; `key` is nowhere else."""

    id: str
    key: str
    user: User


class StoredKey(NamedTuple):
    """What is known of a key; times in microseconds since the epoch."""

    id: str
    user_id: str
    tier: str
    created_at: int
    revoked_at: int | None


class KeyTable(SqlDatabase):
    """Keys in a database.

    Args:
        url: Where it is, with an asynchronous driver.
        clock: Where time comes from, for tests.
        timeout: Seconds that PostgreSQL has for an operation.
    """

    def __init__(self, url: URL, clock: Clock | None = None, *, timeout: float = DEFAULT_LIMIT) -> None:
        super().__init__(url, timeout)
        self._clock = WallClock() if clock is None else clock

    async def prepare(self) -> None:
        """Make the tables if there are none.

        Raises:
            SettingsError: The database cannot be used.
        """
        migrations = read_migrations(resources.files(__package__).joinpath("migrations"))
        await self.check(migrations, record="headgate_tier_migrations")

    async def find(self, key: str) -> User | None:
        """Return whom a key belongs to; `None` if it is none of ours, or was revoked."""
        if not _KEY.fullmatch(key):
            return None
        async with self.connection() as connection:
            found = (await connection.execute(text(_FIND), {"digest": digest_of(key)})).one_or_none()
        return None if found is None else User(*found)

    async def create(self, user_id: str, tier: str | None = None) -> NewKey:
        """Make a key for a user, who is made too if there is none.

        Args:
            user_id: Who; all keys of a user draw from one bucket.
            tier: Which tier the user has from now on; by default the one they have, or `free`.

        Raises:
            ConfigError: The id or the tier is no name.
        """
        if not user_id or len(user_id) > LONGEST_USER_ID or not user_id.isprintable():
            raise ConfigError(f"a user's id is 1 to {LONGEST_USER_ID} printable characters, not {user_id!r}")
        if tier is not None and not re.fullmatch(r"[\w.-]{1,64}", tier):
            raise ConfigError(f"a tier is a word like 'pro', not {tier!r}")
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
        """Return all keys, the oldest first."""
        async with self.connection() as connection:
            return [StoredKey(*row) for row in await connection.execute(text(_LIST))]

    async def revoke(self, key_id: str) -> bool:
        """End a key, from the next request on; false if there is none with this id that is still good."""
        async with self.connection(writing=True) as connection:
            result: Any = await connection.execute(text(_REVOKE), {"id": key_id, "now": self._clock.now_us()})
        return bool(result.rowcount)


def digest_of(key: str) -> str:
    """Return what is stored of a key."""
    return sha256(key.encode()).hexdigest()
