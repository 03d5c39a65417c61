"""The limiter of submissions (FR-1.5, HC-4, D4)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol
from uuid import UUID

_SECOND = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class RateLimitResult:
    """The result of a check.

    Attributes:
        allowed: Whether one more petition is admitted.
        remaining: How many more petitions the limit in `scope` admits.
        reset_at: After a refusal, when the next petition is admitted; otherwise when the oldest counter leaves the window.
        current_count: The count in the window.
        limit: The limit.
        scope: The limit that was decisive: `submitter`, `realm` or `global`.
        checked_at: The time of the check, by the clock of the counters.
    """

    allowed: bool
    remaining: int
    reset_at: datetime
    current_count: int
    limit: int
    scope: str = "submitter"
    checked_at: datetime | None = None

    @property
    def retry_after_seconds(self) -> int:
        """Whole seconds until `reset_at`, rounded up, at least 1."""
        wait = self.reset_at - (self.checked_at or datetime.now(UTC))
        return max(1, -(-wait // _SECOND))


class RateLimiterPort(Protocol):
    """Limits the petitions of a submitter (FR-1.5, HC-4), with its state in PostgreSQL (D4)."""

    async def check_rate_limit(self, submitter_id: UUID, *, realm: str | None = None) -> RateLimitResult:
        """Return whether one more petition is admitted, without counting it."""

    async def record_submission(self, submitter_id: UUID, *, realm: str | None = None) -> None:
        """Count a petition in the current transaction, after it was saved there.

        Raises:
            RateLimitExceededError: The limit was reached since the check. The transaction must be rolled back.
        """

    async def get_remaining(self, submitter_id: UUID) -> int:
        """Return how many more petitions of this submitter are admitted."""

    def get_limit(self) -> int:
        """Return the limit per submitter and window (HC-4)."""

    def get_window_minutes(self) -> int:
        """Return the length of the window."""
