"""The counter of a submitter for one minute.

The count of a submitter in the sliding window is the sum of the counters whose minute began within the window, so capacity
returns minute by minute. Counters older than the TTL, which is longer than the window, are deleted by the cleanup.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID


@dataclass(frozen=True, slots=True)
class RateLimitBucket:
    """The number of petitions of a submitter in one minute (FR-1.5, HC-4).

    Attributes:
        submitter_id: The submitter.
        bucket_minute: The beginning of the minute.
        count: The number of petitions, at least 1.
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
        """Return whether the counter is in the window; exactly a window ago is outside."""
        return self.bucket_minute > now - window

    def expires_at(self, window: timedelta) -> datetime:
        """Return when the counter leaves the window."""
        return self.bucket_minute + window


def start_of_minute(instant: datetime) -> datetime:
    """Return the beginning of the minute of a time, in UTC.

    Raises:
        ValueError: The time has no time zone.
    """
    if instant.tzinfo is None:
        raise ValueError(f"{instant.isoformat()} has no time zone")
    return instant.astimezone(UTC).replace(second=0, microsecond=0)
