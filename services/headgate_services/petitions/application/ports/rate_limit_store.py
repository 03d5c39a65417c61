"""Where submissions are counted: in counters per submitter and minute (D4)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol
from uuid import UUID


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


@dataclass(frozen=True, slots=True)
class ScopeUsage:
    """What one limit of a policy has counted.

    Attributes:
        scope: Whose limit: `submitter`, `realm` or `global`.
        limit: How much may be counted.
        count: What was counted before this call.
        next_allowed: When one more unit is admitted if no one else comes.
        oldest_expiry: When the oldest counter leaves the window; `None` if there is none.
    """

    scope: str
    limit: int
    count: int
    next_allowed: datetime
    oldest_expiry: datetime | None

    @property
    def allowed(self) -> bool:
        """Whether one more unit is admitted."""
        return self.count < self.limit


@dataclass(frozen=True, slots=True)
class UsageReport:
    """What all limits of a policy have counted; the submitter's comes first."""

    at: datetime
    usages: tuple[ScopeUsage, ...]

    @property
    def allowed(self) -> bool:
        """Whether all limits admit one more unit."""
        return all(usage.allowed for usage in self.usages)

    @property
    def submitter(self) -> ScopeUsage:
        """What the submitter's own limit has counted."""
        return self.usages[0]

    @property
    def binding(self) -> ScopeUsage:
        """Of a refusal, the limit that must be waited for longest; else the submitter's."""
        refusing = [usage for usage in self.usages if not usage.allowed]
        return max(refusing, key=lambda usage: usage.next_allowed) if refusing else self.submitter


@dataclass(frozen=True, slots=True)
class CleanupResult:
    """What a cleanup did: how many counters it deleted from before when; it did not run if another was at it."""

    deleted: int
    cutoff: datetime
    ran: bool


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
    ) -> UsageReport:
        """Return what all limits have counted, with one statement."""

    async def hold(
        self, policy: RateLimitPolicy, submitter_id: UUID, realm: str | None = None
    ) -> UsageReport:
        """Count one unit under all limits if all admit it, in the transaction under way; else count nothing.

        Others who count for the same submitter wait until that transaction has ended.
        """

    async def cleanup_expired_buckets(self, older_than: timedelta) -> CleanupResult:
        """Delete the counters of minutes that began longer ago than that, unless another instance is doing so."""
