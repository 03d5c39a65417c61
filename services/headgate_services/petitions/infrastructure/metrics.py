"""Prometheus metrics.

The series of the limit have the submitter as a label, and there may be millions of submitters. So only `max_submitters` have
separate series; the others share the label `other`. The series of a submitter are removed after `forget_after` seconds
without a request, at the next scrape or when another submitter needs the place. The gauge of remaining petitions is removed
when the oldest counter leaves the window, because its value may have changed then. Several processes share files that cannot
remove series; there, the gauge becomes NaN and no series is removed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from uuid import UUID

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from headgate.observe.prometheus import all_processes
from headgate_server.hosting import METRICS_FOLDER
from headgate_services.petitions.application.ports import RateLimitResult

OTHERS = "other"
_ALL = ("service", "environment")


class MetricsCollector:
    """All metrics of one instance, on a separate registry.

    Args:
        service: Value of the label `service`.
        environment: Value of the label `environment`.
        max_submitters: The number of submitters with separate series.
        forget_after: Seconds without a request after which these series are removed.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        service: str = "archon72-api",
        environment: str = "development",
        *,
        max_submitters: int = 1_000,
        forget_after: float = 3_660.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = CollectorRegistry()
        self._base = (service, environment)
        self._max_submitters = max_submitters
        self._forget_after = forget_after
        self._clock = clock
        self._heard: dict[str, float] = {}  # oldest first
        self._valid_until: dict[str, float] = {}
        self._is_shared = METRICS_FOLDER in os.environ
        self.petition_rate_limit_hits_total = self._counter(
            "petition_rate_limit_hits_total",
            "Total petition submissions rejected due to rate limiting",
            "submitter_id",
        )
        self.petition_co_sign_rate_limit_hits_total = self._counter(
            "petition_co_sign_rate_limit_hits_total", "Total co-signs rejected due to rate limiting"
        )
        self.petition_rate_limit_remaining = self._gauge(
            "petition_rate_limit_remaining",
            "Remaining submissions before rate limit for active submitters",
            "submitter_id",
        )
        self.petition_rate_limit_checks = self._counter(
            "petition_rate_limit_checks_total", "Petition submissions by result of the rate limit", "result"
        )
        self.petition_queue_depth = self._gauge("petition_queue_depth", "Petitions that wait", "state")
        self.petition_queue_threshold = self._gauge("petition_queue_threshold", "Petitions that may wait")
        self.petition_queue_rejections = self._counter(
            "petition_queue_rejections_total", "Petitions refused because too many wait"
        )

    def checked(self, submitter_id: UUID, result: RateLimitResult) -> None:
        """Count a refusal, and set the gauge of remaining petitions.

        An allowed check is counted by `recorded`, because the petition may still be refused there.
        """
        if not result.allowed:
            self.petition_rate_limit_checks.labels(*self._base, "blocked").inc()
        if result.scope == "submitter":
            valid = result.reset_at - (result.checked_at or datetime.now(UTC))
            self._set_remaining(submitter_id, result.remaining, valid.total_seconds())

    def recorded(self, submitter_id: UUID, remaining: int, valid_seconds: float) -> None:
        """Count an allowed submission, and set the gauge of remaining petitions."""
        self.petition_rate_limit_checks.labels(*self._base, "allowed").inc()
        self._set_remaining(submitter_id, remaining, valid_seconds)

    def refused(self, submitter_id: UUID, counter: str = "submission") -> None:
        """Count a 429 of a submission or of a co-sign."""
        if counter == "co_sign":
            self.petition_co_sign_rate_limit_hits_total.labels(*self._base).inc()
            return
        self.petition_rate_limit_hits_total.labels(*self._base, self._label(submitter_id)).inc()

    def queue_measured(self, depth: int, threshold: int) -> None:
        """Set the gauges of the queue."""
        self.petition_queue_depth.labels(*self._base, "RECEIVED").set(depth)
        self.petition_queue_threshold.labels(*self._base).set(threshold)

    def queue_rejected(self) -> None:
        """Count a refusal because the queue is full."""
        self.petition_queue_rejections.labels(*self._base).inc()

    def render(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        self._forget_silent()
        self._forget_outdated()
        return generate_latest(all_processes(self.registry))

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(name, documentation, (*_ALL, *labels), registry=self.registry)

    def _gauge(self, name: str, documentation: str, *labels: str) -> Gauge:
        return Gauge(
            name,
            documentation,
            (*_ALL, *labels),
            registry=self.registry,
            multiprocess_mode="mostrecent",
        )

    def _set_remaining(self, submitter_id: UUID, remaining: int, valid_seconds: float) -> None:
        label = self._label(submitter_id)
        self.petition_rate_limit_remaining.labels(*self._base, label).set(remaining)
        self._valid_until[label] = self._clock() + valid_seconds

    def _label(self, submitter_id: UUID) -> str:
        """Return the label of a submitter: the id if there is a place, otherwise `other`."""
        label = str(submitter_id)
        known = self._heard.pop(label, None) is not None
        if not known and len(self._heard) >= self._max_submitters:
            self._forget_silent()
        if not known and len(self._heard) >= self._max_submitters:
            return OTHERS
        self._heard[label] = self._clock()
        return label

    def _forget_outdated(self) -> None:
        """Remove gauges whose value may have changed since."""
        now = self._clock()
        for label in [label for label, until in self._valid_until.items() if until <= now]:
            self._drop_remaining(label)

    def _drop_remaining(self, label: str) -> None:
        if self._valid_until.pop(label, None) is None:
            return
        if self._is_shared:  # the shared files cannot remove series
            self.petition_rate_limit_remaining.labels(*self._base, label).set(float("nan"))
        else:
            self.petition_rate_limit_remaining.remove(*self._base, label)

    def _forget_silent(self) -> None:
        if self._is_shared:  # the shared files cannot remove series
            return
        deadline = self._clock() - self._forget_after
        while self._heard:
            label, heard = next(iter(self._heard.items()))
            if heard > deadline:
                return
            del self._heard[label]
            self._drop_remaining(label)
            self.petition_rate_limit_hits_total.remove(*self._base, label)
