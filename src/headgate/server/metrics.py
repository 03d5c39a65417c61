"""Metrics for Prometheus, of all workers together.

With several workers every process writes its counts into files of a folder that they share, and whoever is asked adds them
up. `prometheus_client` decides which it is when it is imported, so a worker must have been started with `METRICS_FOLDER` in
its environment.
"""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest

from headgate.observe.prometheus import PrometheusHook, ShadowHook, all_processes

CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()


class Metrics:
    """The hooks that count, and what they have counted."""

    def __init__(self) -> None:
        own = CollectorRegistry()
        self.hook = PrometheusHook(own)
        self.shadow_hook = ShadowHook(own)
        self._shown = all_processes(own)
        if self._shown is own:
            ProcessCollector(registry=own)

    def text(self) -> bytes:
        """Return everything in Prometheus's text format."""
        return generate_latest(self._shown)
