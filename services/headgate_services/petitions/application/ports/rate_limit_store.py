"""Where submissions are counted: in counters per submitter and minute (D4)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol
from uuid import UUID

from headgate.stores.postgres import BucketDecision, Cleanup


@dataclass(frozen=True, slots=True)
class RateLimitPolicy:
    """How much may be counted.

    Attributes:
        limit: Most units of one submitter in the window.
        window_minutes: How long the window is.
        strict: Whether a unit counts from the end of its minute instead of its beginning.
        realm_limit: Most units of one realm in the window; 0 for no such limit.
        global_limit: Most units in the window altogether; 0 for no such limit.
    """

    limit: int
    window_minutes: int
    strict: bool = False
    realm_limit: int = 0
    global_limit: int = 0

    @property
    def window(self) -> timedelta:
        """How long the window is."""
        return timedelta(minutes=self.window_minutes)


class RateLimitStorePort(Protocol):
    """Counts submissions, or whatever else `counter` names, in minutes.

    Time is the database's, so that instances cannot disagree.
    """

    @property
    def counter(self) -> str:
        """What is counted; stores of different names count apart."""

    async def get_submission_count(self, submitter_id: UUID, since: datetime) -> int:
        """Return the sum of the counters whose minute began later than `since`; 0 if there are none."""

    async def increment_bucket(self, submitter_id: UUID, bucket_minute: datetime) -> None:
        """Add one to the counter of a minute, whatever the limit."""

    async def get_oldest_bucket_expiry(self, submitter_id: UUID, since: datetime) -> datetime | None:
        """Return when the oldest counter later than `since` leaves the window; `None` if there is none."""

    async def get_usage(
        self, policy: RateLimitPolicy, submitter_id: UUID, realm: str | None = None
    ) -> BucketDecision:
        """Return what all limits have counted, the submitter's first, with one statement."""

    async def hold(
        self, policy: RateLimitPolicy, submitter_id: UUID, realm: str | None = None
    ) -> BucketDecision:
        """Count one unit under all limits if all admit it, in the transaction under way; else count nothing.

        Others who count for the same submitter wait until that transaction has ended.
        """

    async def cleanup_expired_buckets(self, older_than: timedelta) -> Cleanup:
        """Delete the counters of minutes that began longer ago than that, unless another instance is doing so."""
