"""The counters in PostgreSQL, on Headgate's bucket table (FR-1.5, D4)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from functools import lru_cache
from uuid import UUID, uuid5

from headgate import Quota, Rule, sliding_window
from headgate.stores.postgres import AsyncBucketTable, BucketDecision, Cleanup
from headgate_services.petitions.application.ports.rate_limit_store import RateLimitPolicy
from headgate_services.petitions.domain.models import start_of_minute
from headgate_services.petitions.infrastructure.adapters.persistence.database import Database

_MINUTE_US = 60_000_000
_CLEANUP_SECONDS = 60.0  # for all its batches together
_TABLE = "petition_rate_limit_buckets"
SUBMISSION = "submission"
"""The counter of the document; its keys are the ids of submitters."""

_STAND_INS = UUID("b4c5a0a4-6a2c-5d29-9c43-0f6f3a6f9d16")

_COUNT = f"SELECT coalesce(sum(count), 0) FROM {_TABLE} WHERE submitter_id = %s AND bucket_minute > %s"
_OLDEST = f"SELECT min(bucket_minute) FROM {_TABLE} WHERE submitter_id = %s AND bucket_minute > %s"
_RESET = f"DELETE FROM {_TABLE} WHERE submitter_id = %s RETURNING count"
_INCREMENT = f"""
    INSERT INTO {_TABLE} AS old (submitter_id, bucket_minute) VALUES (%s, %s)
    ON CONFLICT (submitter_id, bucket_minute) DO UPDATE SET count = old.count + 1
"""


class PostgresRateLimitStore:
    """Counters in `petition_rate_limit_buckets`.

    Submissions use the submitter's id as key. Other counters use ids derived from the counter's name and the submitter's
    id, so that all of them share the table but count separately.

    Args:
        database: The database with the table.
        window_minutes: The length of the window, for `get_oldest_bucket_expiry`.
        counter: The kind of unit.
        now: A clock for tests; `None` for the database's clock.
    """

    def __init__(
        self,
        database: Database,
        window_minutes: int = 60,
        *,
        counter: str = SUBMISSION,
        now: Callable[[], datetime] | None = None,
    ) -> None:
        self.counter = counter
        self._database = database
        self._window = timedelta(minutes=window_minutes)
        self._now = now

    async def get_submission_count(self, submitter_id: UUID, since: datetime) -> int:
        async with self._database.connection() as connection:
            row = await (await connection.execute(_COUNT, [self._id(submitter_id), since])).fetchone()
        return int(row[0]) if row else 0

    async def increment_bucket(self, submitter_id: UUID, bucket_minute: datetime) -> None:
        """Add one to the counter of the minute of a time, without checking the limit."""
        async with self._database.connection() as connection:
            await connection.execute(_INCREMENT, [self._id(submitter_id), start_of_minute(bucket_minute)])

    async def get_oldest_bucket_expiry(self, submitter_id: UUID, since: datetime) -> datetime | None:
        async with self._database.connection() as connection:
            row = await (await connection.execute(_OLDEST, [self._id(submitter_id), since])).fetchone()
        oldest: datetime | None = row[0] if row else None
        return None if oldest is None else start_of_minute(oldest) + self._window

    async def get_usage(
        self, policy: RateLimitPolicy, submitter_id: UUID, realm: str | None = None
    ) -> BucketDecision:
        table = _bucket_table(policy, realm is not None, self.counter)
        async with self._database.connection() as connection:
            return await table.check(connection, self._key(policy, submitter_id, realm), now=self._time())

    async def hold(
        self, policy: RateLimitPolicy, submitter_id: UUID, realm: str | None = None
    ) -> BucketDecision:
        """Count one unit if all limits admit it, in the current transaction or a new one."""
        table = _bucket_table(policy, realm is not None, self.counter)
        async with self._database.transaction() as connection:
            return await table.hold(connection, self._key(policy, submitter_id, realm), now=self._time())

    async def reset(self, submitter_id: UUID) -> int:
        """Clear the counts of a submitter, and return the number of removed units."""
        async with self._database.connection() as connection:
            rows = await (await connection.execute(_RESET, [self._id(submitter_id)])).fetchall()
        return sum(count for (count,) in rows)

    async def cleanup_expired_buckets(self, older_than: timedelta) -> Cleanup:
        # The limits do not matter here, only the age of the counters.
        table = _bucket_table(RateLimitPolicy(1, 1), False, self.counter)
        async with self._database.connection(_CLEANUP_SECONDS) as connection:
            return await table.cleanup(connection, older_than=older_than, now=self._time())

    def _time(self) -> datetime | None:
        return None if self._now is None else self._now()

    def _id(self, submitter_id: UUID) -> UUID:
        if self.counter == SUBMISSION:
            return submitter_id
        return uuid5(_STAND_INS, f"{self.counter}/{submitter_id}")

    def _key(self, policy: RateLimitPolicy, submitter_id: UUID, realm: str | None) -> dict[str, UUID | str]:
        submitter_id = self._id(submitter_id)
        if (policy.realm_limit or policy.global_limit) and submitter_id.version == 8:
            # The table uses UUIDs of version 8 for realms and the global counter; submitters must not collide with them.
            submitter_id = uuid5(_STAND_INS, str(submitter_id))
        key: dict[str, UUID | str] = {"submitter": submitter_id}
        if policy.realm_limit and realm is not None:
            key["realm"] = realm if self.counter == SUBMISSION else f"{self.counter}/{realm}"
        if policy.global_limit and self.counter != SUBMISSION:
            key["counter"] = self.counter
        return key


@lru_cache(maxsize=64)
def _bucket_table(policy: RateLimitPolicy, has_realm: bool, counter: str) -> AsyncBucketTable:
    rules = [_rule(policy, "submitter", policy.limit, "submitter")]
    if policy.realm_limit and has_realm:
        rules.append(_rule(policy, "realm", policy.realm_limit, "realm"))
    if policy.global_limit:
        rules.append(
            _rule(policy, "global", policy.global_limit, "*" if counter == SUBMISSION else "counter")
        )
    return AsyncBucketTable(
        *rules, table=_TABLE, key="submitter_id", bucket="bucket_minute", key_type="uuid", plain="submitter"
    )


def _rule(policy: RateLimitPolicy, name: str, limit: int, scope: str) -> Rule:
    quota = Quota(limit, policy.window_minutes * _MINUTE_US)
    return sliding_window(quota, scope=scope, name=name, buckets=policy.window_minutes, strict=policy.strict)
