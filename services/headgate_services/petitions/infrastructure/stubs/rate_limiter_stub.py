"""A limiter for tests. It has no clock, so counts never expire."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

from headgate_services.petitions.application.ports import RateLimitResult
from headgate_services.petitions.domain.errors import RateLimitExceededError


class RateLimiterStub:
    """A limiter with configurable limit and counts.

    Args:
        limit: The limit per submitter.
        window_minutes: The reported length of the window.
        count: The initial count of every submitter.
    """

    def __init__(self, limit: int = 10, window_minutes: int = 60, count: int = 0) -> None:
        self._limit = limit
        self._window_minutes = window_minutes
        self._initial = count
        self._counts: dict[UUID, int] = {}

    @classmethod
    def at_limit(cls, limit: int = 10) -> RateLimiterStub:
        """Return a stub with every submitter at the limit."""
        return cls(limit, count=limit)

    async def check_rate_limit(self, submitter_id: UUID, *, realm: str | None = None) -> RateLimitResult:
        """Return the configured result."""
        count = self.get_count(submitter_id)
        return RateLimitResult(
            allowed=count < self._limit,
            remaining=max(0, self._limit - count),
            reset_at=datetime.now(UTC) + timedelta(minutes=self._window_minutes),
            current_count=count,
            limit=self._limit,
        )

    async def record_submission(self, submitter_id: UUID, *, realm: str | None = None) -> None:
        """Count one petition, if the limit admits it."""
        result = await self.check_rate_limit(submitter_id)
        if not result.allowed:
            raise RateLimitExceededError(submitter_id, result.current_count, result.limit, result.reset_at)
        self._counts[submitter_id] = result.current_count + 1

    async def get_remaining(self, submitter_id: UUID) -> int:
        """Return the remaining petitions."""
        return (await self.check_rate_limit(submitter_id)).remaining

    def get_limit(self) -> int:
        """Return the limit."""
        return self._limit

    def get_window_minutes(self) -> int:
        """Return the reported length of the window."""
        return self._window_minutes

    def get_count(self, submitter_id: UUID) -> int:
        """Return the count of a submitter."""
        return self._counts.get(submitter_id, self._initial)

    def set_count(self, submitter_id: UUID, count: int) -> None:
        """Set the count of a submitter."""
        self._counts[submitter_id] = count
