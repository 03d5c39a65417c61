"""Metrics for Prometheus.

The series of the limit carry the submitter, of whom there may be millions; so only so many submitters have series of their
own at a time. The others share the one called `other`. A submitter's series are dropped when nothing has been heard of them
for as long as the window, at the next scrape or when their place is needed. What remains is dropped as soon as it may have
changed by itself: when the oldest counter leaves the window. With several processes, which share files that take additions
only, it becomes NaN instead, and no series is dropped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from uuid import UUID

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from headgate.observe.prometheus import all_processes
from headgate_server.hosting import METRICS_FOLDER
from headgate_services.petitions.application.ports import RateLimitResult

OTHERS = "other"
_ALL = ("service", "environment")


class MetricsCollector:
    """All metrics of one instance, on a registry of its own.

    Args:
        service: Value of the label `service`.
        environment: Value of the label `environment`.
        max_submitters: How many submitters have series of their own.
        forget_after: Seconds after which a submitter of whom nothing was heard loses them.
        clock: Seconds that never go back.
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
        self.http_requests = self._counter(
            "http_requests_total", "HTTP requests", "method", "endpoint", "status"
        )
        self.http_requests_failed = self._counter(
            "http_requests_failed_total",
            "HTTP requests answered with an error",
            "method",
            "endpoint",
            "error_type",
        )
        self.http_request_duration = Histogram(
            "http_request_duration_seconds",
            "Duration of HTTP requests",
            (*_ALL, "method", "endpoint"),
            registry=self.registry,
        )
        self.service_starts = self._counter("service_starts_total", "Starts of the service")
        self.service_starts.labels(*self._base).inc()
        started = clock()
        uptime = Gauge("uptime_seconds", "Seconds since the service started", _ALL, registry=self.registry)
        uptime.labels(*self._base).set_function(lambda: clock() - started)

    def checked(self, submitter_id: UUID, result: RateLimitResult) -> None:
        """Count a refusal; show how many petitions remain.

        A check that passes is counted by `recorded`: the petition may still be refused when it is counted.
        """
        if not result.allowed:
            self.petition_rate_limit_checks.labels(*self._base, "blocked").inc()
        if result.scope == "submitter":
            valid = result.reset_at - (result.checked_at or datetime.now(UTC))
            self._set_remaining(submitter_id, result.remaining, valid.total_seconds())

    def recorded(self, submitter_id: UUID, remaining: int, valid_seconds: float) -> None:
        """Count an allowed submission; show how many petitions remain."""
        self.petition_rate_limit_checks.labels(*self._base, "allowed").inc()
        self._set_remaining(submitter_id, remaining, valid_seconds)

    def refused(self, submitter_id: UUID, counter: str = "submission") -> None:
        """Count a 429 of a submission or, apart from those, of a co-sign."""
        if counter == "co_sign":
            self.petition_co_sign_rate_limit_hits_total.labels(*self._base).inc()
            return
        self.petition_rate_limit_hits_total.labels(*self._base, self._label(submitter_id)).inc()

    def queue_measured(self, depth: int, threshold: int) -> None:
        """Take note of how many petitions wait."""
        self.petition_queue_depth.labels(*self._base, "RECEIVED").set(depth)
        self.petition_queue_threshold.labels(*self._base).set(threshold)

    def queue_rejected(self) -> None:
        """Count a refusal for lack of room."""
        self.petition_queue_rejections.labels(*self._base).inc()

    def answered(self, method: str, endpoint: str, status: int, seconds: float) -> None:
        """Count an HTTP request; `endpoint` is the route's template, of which there are few."""
        self.http_requests.labels(*self._base, method, endpoint, str(status)).inc()
        self.http_request_duration.labels(*self._base, method, endpoint).observe(seconds)
        if status >= 400:
            error_type = (
                "rate_limited" if status == 429 else "server_error" if status >= 500 else "client_error"
            )
            self.http_requests_failed.labels(*self._base, method, endpoint, error_type).inc()

    def render(self) -> bytes:
        """Return everything as text for Prometheus."""
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
        """Return what a submitter's series are called: by their id if there is a place for them."""
        label = str(submitter_id)
        known = self._heard.pop(label, None) is not None
        if not known and len(self._heard) >= self._max_submitters:
            self._forget_silent()
        if not known and len(self._heard) >= self._max_submitters:
            return OTHERS
        self._heard[label] = self._clock()
        return label

    def _forget_outdated(self) -> None:
        """Drop what a counter that has left the window since has made untrue."""
        now = self._clock()
        for label in [label for label, until in self._valid_until.items() if until <= now]:
            self._drop_remaining(label)

    def _drop_remaining(self, label: str) -> None:
        if self._valid_until.pop(label, None) is None:
            return
        if self._is_shared:  # the files that processes share take additions only
            self.petition_rate_limit_remaining.labels(*self._base, label).set(float("nan"))
        else:
            self.petition_rate_limit_remaining.remove(*self._base, label)

    def _forget_silent(self) -> None:
        if self._is_shared:  # a place in the files is for ever, so there is nothing to gain
            return
        deadline = self._clock() - self._forget_after
        while self._heard:
            label, heard = next(iter(self._heard.items()))
            if heard > deadline:
                return
            del self._heard[label]
            self._drop_remaining(label)
            self.petition_rate_limit_hits_total.remove(*self._base, label)
