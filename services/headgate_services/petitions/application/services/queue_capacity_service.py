"""The capacity of the queue of petitions.

The queue is full at the threshold and accepts petitions again only below threshold - hysteresis. The number of waiting
petitions is counted at most once per `cache_ttl_seconds`. Each petition adds one to that number in the transaction that
saves it, or is not saved, so concurrent submissions cannot exceed the threshold.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from headgate_services.petitions.application.services.logging_mixin import LoggingMixin
from headgate_services.petitions.config import PetitionQueueConfig
from headgate_services.petitions.domain.errors import QueueOverflowError
from headgate_services.petitions.infrastructure.adapters.persistence import PetitionRecords
from headgate_services.petitions.infrastructure.metrics import MetricsCollector


class QueueCapacityService(LoggingMixin):
    """Refuses petitions while too many are waiting. Each process has its own hysteresis.

    Args:
        records: The stored number of waiting petitions.
        config: Thresholds and times.
        metrics: Receives the depth and refusals.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        records: PetitionRecords,
        config: PetitionQueueConfig,
        metrics: MetricsCollector | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._init_logger(component="petition.queue_capacity")
        self._records = records
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._depth = 0
        self._good_until = float("-inf")
        self._is_rejecting = False
        self._counting = asyncio.Lock()

    async def is_accepting_submissions(self) -> bool:
        """Return whether the queue has room."""
        depth = await self.get_queue_depth()
        threshold, hysteresis = self._config.threshold, self._config.hysteresis
        if depth >= threshold:
            self._start_rejecting(depth)
        elif self._is_rejecting and depth < threshold - hysteresis:
            self._is_rejecting = False
            self._log.info("queue_capacity_resumed", queue_depth=depth, threshold=threshold)
        return not self._is_rejecting

    async def get_queue_depth(self) -> int:
        """Return the number of waiting petitions; counted at most once per `cache_ttl_seconds`."""
        # Concurrent callers wait for the same count.
        async with self._counting:
            if self._clock() >= self._good_until:
                ttl = self._config.cache_ttl_seconds
                measure = await self._records.measure_queue(ttl)
                self._depth = measure.depth
                self._good_until = self._clock() + ttl - measure.age
                self._notify()
        return self._depth

    async def take_place(self) -> None:
        """Add a petition to the queue, in the transaction that saves it.

        Raises:
            QueueOverflowError: The queue is full. The transaction must be rolled back.
        """
        depth = await self._records.take_place(self._config.threshold)
        if depth is None:
            self._depth = max(self._depth, self._config.threshold)
            self._start_rejecting(self._depth)
            raise self.refuse()
        self._depth = max(self._depth, depth)
        self._notify()

    def refuse(self) -> QueueOverflowError:
        """Log and count a refusal because the queue is full, and return the error."""
        self._log.info(
            "petition_rejected_queue_overflow", queue_depth=self._depth, threshold=self._config.threshold
        )
        if self._metrics is not None:
            self._metrics.queue_rejected()
        return QueueOverflowError(self._depth, self._config.threshold, self._config.retry_after_seconds)

    def _start_rejecting(self, depth: int) -> None:
        if not self._is_rejecting:
            self._is_rejecting = True
            self._log.warning("queue_capacity_exceeded", queue_depth=depth, threshold=self._config.threshold)

    def _notify(self) -> None:
        if self._metrics is not None:
            self._metrics.queue_measured(self._depth, self._config.threshold)
