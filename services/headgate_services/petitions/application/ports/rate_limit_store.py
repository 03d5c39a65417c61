"""The store of the counters per submitter and minute (D4)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol
from uuid import UUID

from headgate.stores.postgres import BucketDecision, Cleanup


@dataclass(frozen=True, slots=True)
class RateLimitPolicy:
    """The limits of a counter.

    Attributes:
        limit: The most units of a submitter in the window.
        window_minutes: The length of the window.
        strict: Whether a unit counts from the end of its minute instead of its beginning.
        realm_limit: The most units of a realm in the window; 0 for unlimited.
        global_limit: The most units of all submitters in the window; 0 for unlimited.
    """

    limit: int
    window_minutes: int
    strict: bool = False
    realm_limit: int = 0
    global_limit: int = 0

    @property
    def window(self) -> timedelta:
        """The length of the window."""
        return timedelta(minutes=self.window_minutes)


class RateLimitStorePort(Protocol):
    """Counts submissions, or other units named by `counter`, per minute.

    The database's clock is used, so that all instances agree.
    """

    @property
    def counter(self) -> str:
        """The kind of unit; stores with different names count separately."""

    async def get_submission_count(self, submitter_id: UUID, since: datetime) -> int:
        """Return the sum of the counters whose minute began later than `since`."""

    async def increment_bucket(self, submitter_id: UUID, bucket_minute: datetime) -> None:
        """Add one to the counter of a minute, without checking the limit."""

    async def get_oldest_bucket_expiry(self, submitter_id: UUID, since: datetime) -> datetime | None:
        """Return when the oldest counter later than `since` leaves the window; `None` without counters."""

    async def get_usage(
        self, policy: RateLimitPolicy, submitter_id: UUID, realm: str | None = None
    ) -> BucketDecision:
        """Return the counts of all limits, the submitter's first, with one statement."""

    async def hold(
        self, policy: RateLimitPolicy, submitter_id: UUID, realm: str | None = None
    ) -> BucketDecision:
        """Count one unit in the current transaction if all limits admit it; otherwise count nothing.

        Other transactions that count for the same submitter wait until this one ends.
        """

    async def cleanup_expired_buckets(self, older_than: timedelta) -> Cleanup:
        """Delete the counters of minutes that began longer ago, unless another instance is deleting."""
