"""Metrics for Prometheus, of all workers together.

With several workers every process writes its counts into files of a folder that they share, and whoever is asked adds them
up. `prometheus_client` decides which it is when it is imported, so a worker must have been started with `METRICS_FOLDER` in
its environment.
"""

from __future__ import annotations

import os

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from headgate.observe.prometheus import PrometheusHook, ShadowHook

METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable that names the folder; its name is `prometheus_client`'s."""

CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()


class Metrics:
    """The hooks that count, and what they have counted."""

    def __init__(self) -> None:
        own = CollectorRegistry()
        self.hook = PrometheusHook(own)
        self.shadow_hook = ShadowHook(own)
        self._shown = own
        if METRICS_FOLDER in os.environ:
            self._shown = CollectorRegistry()
            MultiProcessCollector(self._shown)  # type: ignore[no-untyped-call]
        else:
            ProcessCollector(registry=own)

    def text(self) -> bytes:
        """Return everything in Prometheus's text format."""
        return generate_latest(self._shown)
