"""A limiter whose answers a test sets. It has no clock: what it counts never expires."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

from headgate_services.petitions.application.ports import RateLimitResult
from headgate_services.petitions.domain.errors import RateLimitExceededError


class RateLimiterStub:
    """Admits or refuses as configured.

    Args:
        limit: How many petitions of one submitter it admits.
        window_minutes: What it says the window is.
        count: How many every submitter has submitted already.
    """

    def __init__(self, limit: int = 10, window_minutes: int = 60, count: int = 0) -> None:
        self._limit = limit
        self._window_minutes = window_minutes
        self._initial = count
        self._counts: dict[UUID, int] = {}
        self._reset_at: datetime | None = None

    @classmethod
    def allowing(cls, limit: int = 10) -> RateLimiterStub:
        """Return one that has counted nothing yet."""
        return cls(limit)

    @classmethod
    def at_limit(cls, limit: int = 10) -> RateLimiterStub:
        """Return one at whose limit every submitter is."""
        return cls(limit, count=limit)

    @classmethod
    def over_limit(cls, limit: int = 10, excess: int = 5) -> RateLimiterStub:
        """Return one above whose limit every submitter is."""
        return cls(limit, count=limit + excess)

    async def check_rate_limit(self, submitter_id: UUID, *, realm: str | None = None) -> RateLimitResult:
        """Return the configured answer."""
        count = self.get_count(submitter_id)
        return RateLimitResult(
            allowed=count < self._limit,
            remaining=max(0, self._limit - count),
            reset_at=self._reset_at or datetime.now(UTC) + timedelta(minutes=self._window_minutes),
            current_count=count,
            limit=self._limit,
        )

    async def record_submission(self, submitter_id: UUID, *, realm: str | None = None) -> None:
        """Count one, if there is room."""
        result = await self.check_rate_limit(submitter_id)
        if not result.allowed:
            raise RateLimitExceededError(submitter_id, result.current_count, result.limit, result.reset_at)
        self._counts[submitter_id] = result.current_count + 1

    async def get_remaining(self, submitter_id: UUID) -> int:
        """Return how many more it admits."""
        return (await self.check_rate_limit(submitter_id)).remaining

    def get_limit(self) -> int:
        """Return its limit."""
        return self._limit

    def get_window_minutes(self) -> int:
        """Return what it says the window is."""
        return self._window_minutes

    def get_count(self, submitter_id: UUID) -> int:
        """Return how many a submitter has submitted."""
        return self._counts.get(submitter_id, self._initial)

    def set_count(self, submitter_id: UUID, count: int) -> None:
        """Say how many a submitter has submitted."""
        self._counts[submitter_id] = count

    def set_limit(self, limit: int) -> None:
        """Say how many it admits."""
        self._limit = limit

    def set_reset_at(self, reset_at: datetime | None) -> None:
        """Say when there is room again; `None` for a window from now."""
        self._reset_at = reset_at

    def reset_submitter(self, submitter_id: UUID) -> None:
        """Forget what a submitter has submitted."""
        self._counts.pop(submitter_id, None)

    def reset(self) -> None:
        """Forget everything but the limit."""
        self._counts.clear()
        self._initial = 0
        self._reset_at = None
