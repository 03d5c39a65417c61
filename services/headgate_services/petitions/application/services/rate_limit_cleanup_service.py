"""Removing counters that have left the window long ago."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from headgate_services.petitions.application.ports.rate_limit_store import RateLimitStorePort
from headgate_services.petitions.application.services.logging_mixin import LoggingMixin


@dataclass(frozen=True, slots=True)
class CleanupReport:
    """What a cleanup did.

    Attributes:
        deleted_count: How many counters it deleted.
        cutoff: Those of minutes that began before this.
        ttl_hours: How old they were at least.
        executed_at: When.
        ran: False if another instance was at it, so that this one left it to that.
    """

    deleted_count: int
    cutoff: datetime
    ttl_hours: int
    executed_at: datetime
    ran: bool


class RateLimitCleanupService(LoggingMixin):
    """Deletes counters older than the TTL, which is longer than the window: nothing that counts is ever deleted.

    Safe with any number of instances: only one of them deletes at a time.
    """

    component = "petition.rate_limit_cleanup"

    def __init__(self, store: RateLimitStorePort, ttl_hours: int = 2) -> None:
        self._store = store
        self._ttl_hours = ttl_hours

    async def cleanup(self) -> int:
        """Delete what is too old, and return how much that was."""
        return (await self.cleanup_and_report()).deleted_count

    async def cleanup_and_report(self) -> CleanupReport:
        """Delete what is too old, log it, and return what was done."""
        age = timedelta(hours=self._ttl_hours)
        done = await self._store.cleanup_expired_buckets(age)
        report = CleanupReport(done.deleted, done.cutoff, self._ttl_hours, done.cutoff + age, done.ran)
        self.log.info(
            "cleanup_completed",
            deleted_count=report.deleted_count,
            cutoff=report.cutoff.isoformat(),
            ttl_hours=report.ttl_hours,
            executed_at=report.executed_at.isoformat(),
            ran=report.ran,
        )
        return report

    async def run_every(
        self, seconds: float, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    ) -> None:
        """Clean up now and after every so many seconds, until cancelled; a failure is logged, and tried again."""
        while True:
            try:
                await self.cleanup_and_report()
            except Exception:
                # Any error: the service goes on, and so must the only task that cleans up.
                self.log.exception("cleanup_failed")
            await sleep(seconds)
