"""The limit on submissions, as the rest of the service sees it (FR-1.5, HC-4, D4)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol
from uuid import UUID

_SECOND = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class RateLimitResult:
    """What a check found.

    Attributes:
        allowed: Whether one more petition is admitted.
        remaining: How many are; of a refusal by a realm's or the global limit, how many that admits.
        reset_at: Of a refusal, when the next petition is admitted if no one else comes; else when the oldest counter
            leaves the window.
        current_count: What was counted in the window.
        limit: How much may be.
        scope: Whose limit this is: `submitter`, `realm` or `global`.
        checked_at: When it was checked, by the clock that also counts.
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
        """Whole seconds until `reset_at`, rounded up so that a client that obeys is not refused again; at least 1."""
        wait = self.reset_at - (self.checked_at or datetime.now(UTC))
        return max(1, -(-wait // _SECOND))


class RateLimiterPort(Protocol):
    """Limits how many petitions a submitter may submit (FR-1.5, HC-4), with its state in PostgreSQL (D4)."""

    async def check_rate_limit(self, submitter_id: UUID, *, realm: str | None = None) -> RateLimitResult:
        """Return whether one more petition is admitted; counts nothing."""

    async def record_submission(self, submitter_id: UUID, *, realm: str | None = None) -> None:
        """Count a petition, in the transaction under way, after it has been saved in that.

        Raises:
            RateLimitExceededError: Others were faster since the check. The transaction is to be rolled back, and the
                petition with it.
        """

    async def get_remaining(self, submitter_id: UUID) -> int:
        """Return how many more petitions of this submitter are admitted."""

    def get_limit(self) -> int:
        """Return how many petitions of one submitter a window may hold (HC-4)."""

    def get_window_minutes(self) -> int:
        """Return how long the window is."""
