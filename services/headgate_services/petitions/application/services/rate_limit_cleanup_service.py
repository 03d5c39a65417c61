"""Removal of expired counters."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

from headgate.stores.postgres import Cleanup
from headgate_services.petitions.application.ports.rate_limit_store import RateLimitStorePort
from headgate_services.petitions.application.services.logging_mixin import LoggingMixin


class RateLimitCleanupService(LoggingMixin):
    """Deletes counters older than the TTL, which is longer than the window.

    Any number of instances may run it; only one deletes at a time.
    """

    def __init__(self, store: RateLimitStorePort, ttl_hours: int = 2) -> None:
        self._init_logger(component="petition.rate_limit_cleanup")
        self._store = store
        self._ttl_hours = ttl_hours

    async def cleanup(self) -> Cleanup:
        """Delete expired counters, and log and return the result."""
        age = timedelta(hours=self._ttl_hours)
        done = await self._store.cleanup_expired_buckets(age)
        self._log.info(
            "cleanup_completed",
            deleted_count=done.deleted,
            cutoff=done.cutoff.isoformat(),
            ttl_hours=self._ttl_hours,
            executed_at=(done.cutoff + age).isoformat(),
            ran=done.ran,
        )
        return done

    async def run_every(
        self, seconds: float, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    ) -> None:
        """Clean up now and every `seconds`, until cancelled; failures are logged."""
        while True:
            try:
                await self.cleanup()
            except Exception:  # noqa: BLE001  # the task must survive any error
                self._log.exception("cleanup_failed")
            await sleep(seconds)
