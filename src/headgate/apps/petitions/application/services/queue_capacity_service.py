"""Whether there is room for another petition.

The queue is full at the threshold and has room again only below threshold - hysteresis, so that it does not flap around
one number. Counting the queue costs a query, so the answer is believed for a while; petitions that this process has
accepted since are added, so that it cannot run past the threshold by itself in the meantime.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from headgate.apps.petitions.application.ports.queue_capacity import QueueObserver
from headgate.apps.petitions.application.services.logging_mixin import LoggingMixin
from headgate.apps.petitions.config import PetitionQueueConfig


class QueueCapacityService(LoggingMixin):
    """Refuses petitions while too many wait. The state is this process's own.

    Args:
        count_waiting: Counts the petitions that wait.
        config: Thresholds and times.
        observer: Hears of the depth and of refusals.
        clock: Seconds that never go back.
    """

    component = "petition.queue_capacity"

    def __init__(
        self,
        count_waiting: Callable[[], Awaitable[int]],
        config: PetitionQueueConfig,
        observer: QueueObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count_waiting = count_waiting
        self._config = config
        self._observer = observer
        self._clock = clock
        self._depth = 0
        self._good_until = float("-inf")
        self._is_rejecting = False
        self._counting = asyncio.Lock()

    async def is_accepting_submissions(self) -> bool:
        """Tell whether there is room."""
        depth = await self.get_queue_depth()
        threshold, hysteresis = self._config.threshold, self._config.hysteresis
        if not self._is_rejecting and depth >= threshold:
            self._is_rejecting = True
            self.log.warning("queue_capacity_exceeded", queue_depth=depth, threshold=threshold)
        elif self._is_rejecting and depth < threshold - hysteresis:
            self._is_rejecting = False
            self.log.info("queue_capacity_resumed", queue_depth=depth, threshold=threshold)
        return not self._is_rejecting

    async def get_queue_depth(self) -> int:
        """Return how many petitions wait; counted at most once per `cache_ttl_seconds`."""
        async with (
            self._counting
        ):  # those who come while it is being counted wait for that, not for a count of their own
            if self._clock() >= self._good_until:
                self._depth = await self._count_waiting()
                self._good_until = self._clock() + self._config.cache_ttl_seconds
                self._tell()
        return self._depth

    def record_acceptance(self) -> None:
        """Take note of a petition that was saved and waits now."""
        self._depth += 1
        self._tell()

    def record_rejection(self) -> None:
        """Take note of a petition that was refused for lack of room."""
        self.log.info(
            "petition_rejected_queue_overflow", queue_depth=self._depth, threshold=self._config.threshold
        )
        if self._observer is not None:
            self._observer.queue_rejected()

    def get_threshold(self) -> int:
        """Return how many may wait."""
        return self._config.threshold

    def get_retry_after_seconds(self) -> int:
        """Return what a refused client is told to wait."""
        return self._config.retry_after_seconds

    def _tell(self) -> None:
        if self._observer is not None:
            self._observer.queue_measured(self._depth, self._config.threshold)
