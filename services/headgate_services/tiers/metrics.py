"""Prometheus metrics of the tiers service."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from headgate.observe.prometheus import all_processes
from headgate_services.tiers.limits import TierLimit
from headgate_services.tiers.middleware import Standing

_REMAINING = (0, 1, 2, 3, 4, 5, 10, 20, 50, 100, 200, 500, 1000, 10_000)


class TierMetrics:
    """The metrics of one service. Labels are tiers of the configuration, so the number of series is bounded."""

    def __init__(self, limits: dict[str, TierLimit]) -> None:
        self.registry = CollectorRegistry()
        self._decisions = Counter(
            "saju_rate_limit_decisions",
            "Requests that were limited, by tier, back end and outcome.",
            ["tier", "backend", "outcome"],
            registry=self.registry,
        )
        self._refusals = Counter(
            "saju_rate_limit_429", "Responses with status 429, by tier.", ["tier"], registry=self.registry
        )
        self._remaining = Histogram(
            "saju_rate_limit_remaining",
            "X-RateLimit-Remaining of the responses, by tier.",
            ["tier"],
            buckets=_REMAINING,
            registry=self.registry,
        )
        limit = Gauge(
            "saju_rate_limit_limit",
            "Requests per minute, by tier.",
            ["tier"],
            registry=self.registry,
            multiprocess_mode="mostrecent",
        )
        for tier, configured in limits.items():
            limit.labels(tier).set(configured.limit)
            self._refusals.labels(tier)
            self._remaining.labels(tier)

    def decided(self, standing: Standing) -> None:
        """Count a decision."""
        outcome = standing.outcome
        allowed = "allowed" if outcome.allowed else "refused"
        self._decisions.labels(standing.tier, outcome.backend, allowed).inc()
        self._remaining.labels(standing.tier).observe(standing.remaining)
        if not outcome.allowed:
            self._refusals.labels(standing.tier).inc()

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(all_processes(self.registry))
