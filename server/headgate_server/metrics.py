"""Metrics for Prometheus, of all workers together.

With several workers, every process writes its counts to files in a shared folder, and the worker that gets the request sums
them. `prometheus_client` reads `METRICS_FOLDER` from the environment when it is imported. The files are mapped into memory,
and writing to a page without space on the disk ends the process (SIGBUS), so space is reserved first. If the disk is full,
counts are lost and nothing else happens.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client import values as prometheus_values
from prometheus_client.mmap_dict import MmapedDict

from headgate import Decision, Hook
from headgate.costs import Cost
from headgate.observe import Call
from headgate.observe.prometheus import PrometheusHook, ShadowHook, all_processes
from headgate_server.hosting import METRICS_FOLDER

logger = logging.getLogger("headgate.server")

CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()


class ReservedDict(MmapedDict):
    """A file of counts whose space on the disk is reserved; methods raise `OSError` if the disk is full."""

    def __init__(self, filename: str, read_mode: bool = False) -> None:
        if not read_mode:
            _create(Path(filename))
        super().__init__(filename, read_mode)  # type: ignore[no-untyped-call]

    def _init_value(self, key: str) -> None:
        wanted: int = self._used + len(key.encode()) + _ENTRY_BYTES
        if wanted > self._capacity:
            _reserve(self._f.fileno(), max(2 * self._capacity, wanted))
        super()._init_value(key)  # type: ignore[no-untyped-call]


_FIRST_BYTES = 65_536
_ENTRY_BYTES = 64
"""Upper bound of the size of an entry without its key."""


def _create(path: Path) -> None:
    """Create a file with space for the first counts; other workers never see an empty one, which they could not read."""
    if path.exists():
        return
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        try:
            _reserve(file.fileno(), _FIRST_BYTES)
        except OSError:
            new.unlink()
            raise
    new.replace(path)


def _reserve(descriptor: int, size: int) -> None:
    allocate: Any = getattr(os, "posix_fallocate", None)  # not available on every system
    if allocate is not None:
        allocate(descriptor, 0, size)


class CollectedDecisions(Hook):
    """Collects similar decisions and counts them together, because counting one takes longer than deciding it.

    Args:
        hook: The hook that counts them when they are flushed. Other events are passed on immediately.
    """

    def __init__(self, hook: PrometheusHook) -> None:
        self._hook = hook
        self._alike: dict[tuple[object, ...], tuple[Call, Decision, list[float]]] = {}

    def attached(self, limiter: Any) -> None:
        self._hook.attached(limiter)

    def completed(self, call: Call, seconds: float, degraded: bool) -> None:
        self._hook.completed(call, seconds, degraded)

    def settled(self, call: Call, cost: Cost | None) -> None:
        self._hook.settled(call, cost)

    def decided(self, call: Call, decision: Decision, seconds: float) -> None:
        if decision.degraded or call.operation == "hold":
            self.flush()  # the last decision determines whether the store is up
            self._hook.decided(call, decision, seconds)
            return
        place = (call.limiter, call.operation, decision.rule, decision.allowed)
        alike = self._alike.get(place)
        if alike is None:
            self._alike[place] = call, decision, [seconds]
        else:
            alike[2].append(seconds)

    def failed(self, call: Call, error: Exception, seconds: float) -> None:
        self.flush()
        self._hook.failed(call, error, seconds)

    def flush(self) -> None:
        """Flush collected decisions to Prometheus; on a full disk they are lost."""
        collected, self._alike = self._alike, {}
        for alike in collected.values():
            try:
                self._hook.decided_alike(*alike)
            except OSError as error:
                logger.error("decisions of limiter '%s' are missing in /metrics: %s", alike[0].limiter, error)  # noqa: TRY400


class ServerMetrics:
    """The hooks for metrics, and their text.

    Attributes:
        hook: The hook for decisions of live rules; `flush` counts what it has collected.
        shadow_hook: The hook for decisions of shadow rules.
    """

    def __init__(self) -> None:
        if METRICS_FOLDER in os.environ:
            prometheus_values.MmapedDict = ReservedDict  # type: ignore[attr-defined]  # the only way to replace it
        own = CollectorRegistry()
        self.hook = CollectedDecisions(PrometheusHook(own))
        self.shadow_hook = ShadowHook(own)
        self._shown = all_processes(own)
        if self._shown is own:
            ProcessCollector(registry=own)

    def flush(self) -> None:
        """Count the decisions since the last call, so that other workers see them."""
        self.hook.flush()

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        self.flush()
        return generate_latest(self._shown)
