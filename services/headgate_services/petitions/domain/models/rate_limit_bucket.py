"""A counter of one submitter for one minute.

The window slides over these: what a submitter has used is the sum of the counters whose minute began within the window.
So capacity returns minute by minute, not all at once, and a table of small rows is all the state there is. Counters
outlive the window by the TTL and are then deleted by the cleanup; the sum does not see them any more by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID


@dataclass(frozen=True, slots=True)
class RateLimitBucket:
    """How many petitions a submitter submitted in one minute (FR-1.5, HC-4).

    Attributes:
        submitter_id: Whose.
        bucket_minute: The beginning of the minute.
        count: How many, at least 1.
    """

    submitter_id: UUID
    bucket_minute: datetime
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"a bucket counts at least 1, not {self.count}")
        if self.bucket_minute != start_of_minute(self.bucket_minute):
            raise ValueError(f"a bucket begins on a whole minute, not at {self.bucket_minute.isoformat()}")

    def counts_at(self, now: datetime, window: timedelta) -> bool:
        """Tell whether it is in the window: one that began exactly a window ago no longer is."""
        return self.bucket_minute > now - window

    def expires_at(self, window: timedelta) -> datetime:
        """Return when it leaves the window."""
        return self.bucket_minute + window


def start_of_minute(instant: datetime) -> datetime:
    """Return the beginning of an instant's minute, in UTC.

    Raises:
        ValueError: The instant has no time zone.
    """
    if instant.tzinfo is None:
        raise ValueError(f"an instant has a time zone; {instant.isoformat()} has none")
    return instant.astimezone(UTC).replace(second=0, microsecond=0)
