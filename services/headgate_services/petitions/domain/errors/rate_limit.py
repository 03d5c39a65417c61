"""Too many petitions."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from headgate_services.petitions.domain.errors.base import PetitionError

_UNITS = {"submission": "petitions", "co_sign": "co-signs"}


class RateLimitExceededError(PetitionError):
    """A submitter, a realm or everybody together has reached the limit (FR-1.5, HC-4). Nothing was counted.

    Attributes:
        submitter_id: Who was refused.
        current_count: What has been counted in the window.
        limit: How much may be.
        reset_at: When the next petition is admitted if nobody else comes.
        retry_after_seconds: How long that is, in whole seconds, rounded up.
        scope: Whose limit it was: `submitter`, `realm` or `global`.
        window_minutes: How long the window is.
        counter: What is counted: `submission` or `co_sign`.
    """

    def __init__(
        self,
        submitter_id: UUID,
        current_count: int,
        limit: int,
        reset_at: datetime,
        retry_after_seconds: int = 1800,
        *,
        scope: str = "submitter",
        window_minutes: int = 60,
        counter: str = "submission",
    ) -> None:
        self.submitter_id = submitter_id
        self.current_count = current_count
        self.limit = limit
        self.reset_at = reset_at
        self.retry_after_seconds = max(1, retry_after_seconds)
        self.scope = scope
        self.window_minutes = window_minutes
        self.counter = counter
        per = "hour" if window_minutes == 60 else f"{window_minutes} minutes"
        super().__init__(f"Maximum {limit} {_UNITS.get(counter, counter)} per {per} exceeded")
