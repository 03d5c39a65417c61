"""Prometheus metrics of a service: decisions of its limiter, and one counter of the service."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, generate_latest

from headgate.observe.prometheus import PrometheusHook, all_processes


class LimiterMetrics:
    """A registry with the metrics of a limiter and one counter.

    Args:
        name: The name of the counter.
        documentation: Its help text.
        label: Its label.
        values: All values of the label. Each has a series from the start, so that `rate()` works.
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
        """Return all metrics in the text format of Prometheus, summed over all processes."""
        return generate_latest(all_processes(self.registry))
