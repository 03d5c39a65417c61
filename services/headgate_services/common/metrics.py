"""Metrics of a service whose limiter is Headgate's: its decisions, and what the service counts besides."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, generate_latest

from headgate.observe.prometheus import PrometheusHook, all_processes


class LimiterMetrics:
    """A registry with the metrics of a limiter, and one counter of the service.

    Args:
        name: The counter's.
        documentation: What it counts.
        label: Its label.
        values: What the label can be; all are there from the start, so that a rate can be taken of each.
    """

    def __init__(self, name: str, documentation: str, label: str, values: tuple[str, ...]) -> None:
        self.registry = CollectorRegistry()
        self.hook = PrometheusHook(self.registry)
        self._counter = Counter(name, documentation, [label], registry=self.registry)
        for value in values:
            self._counter.labels(value)

    def count(self, value: str) -> None:
        """Add one to the counter."""
        self._counter.labels(value).inc()

    def render(self) -> bytes:
        """Return everything as text for Prometheus; with several processes, the sums of all of them."""
        return generate_latest(all_processes(self.registry))
