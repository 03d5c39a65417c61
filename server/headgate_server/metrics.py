"""Metrics for Prometheus, of all workers together.

With several workers every process writes its counts into files of a folder that they share, and the worker that is asked
adds them up. `prometheus_client` decides which it is when it is imported, so a worker must have been started with
`METRICS_FOLDER` in its environment. Those files are mapped into memory: to write to a page that the disk has no room for
ends the process (SIGBUS), so room is made for all of it beforehand. If there is none, what cannot be counted is lost, and
nothing else.
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
    """A file of counts that has all the room on disk that it is mapped for.

    Raises:
        OSError: From every method that needs more room: there is none.
    """

    def __init__(self, filename: str, read_mode: bool = False) -> None:
        if not read_mode:
            _make(Path(filename))
        super().__init__(filename, read_mode)  # type: ignore[no-untyped-call]

    def _init_value(self, key: str) -> None:
        wanted: int = self._used + len(key.encode()) + _ENTRY_BYTES
        if wanted > self._capacity:
            _reserve(self._f.fileno(), max(2 * self._capacity, wanted))
        super()._init_value(key)  # type: ignore[no-untyped-call]


_FIRST_BYTES = 65_536
_ENTRY_BYTES = 64
"""More than what is written beside a key."""


def _make(path: Path) -> None:
    """Make a file with room for the first counts; an empty one is never seen, since other workers could not read it."""
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
    allocate: Any = getattr(os, "posix_fallocate", None)  # which not every system has
    if allocate is not None:
        allocate(descriptor, 0, size)


class CollectedDecisions(Hook):
    """Collects decisions that are alike, and has them counted together: to count one takes longer than to decide it.

    Args:
        hook: What counts them, when they are flushed. Everything else it hears of at once.
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
            self.flush()  # whether the store is up is what was seen last
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
        """Have counted what was collected; what there is no room for is lost."""
        collected, self._alike = self._alike, {}
        for alike in collected.values():
            try:
                self._hook.decided_alike(*alike)
            except OSError as error:
                logger.error("decisions of limiter '%s' are missing in /metrics: %s", alike[0].limiter, error)  # noqa: TRY400


class ServerMetrics:
    """The hooks that count, and what they have counted.

    Attributes:
        hook: Hears of the decisions of live rules; what it has collected is counted by `flush`.
        shadow_hook: Hears of those of shadow rules.
    """

    def __init__(self) -> None:
        if METRICS_FOLDER in os.environ:
            prometheus_values.MmapedDict = ReservedDict  # type: ignore[attr-defined]  # it has no other place for it
        own = CollectorRegistry()
        self.hook = CollectedDecisions(PrometheusHook(own))
        self.shadow_hook = ShadowHook(own)
        self._shown = all_processes(own)
        if self._shown is own:
            ProcessCollector(registry=own)

    def flush(self) -> None:
        """Count what was decided since the last time, for the other workers to see."""
        self.hook.flush()

    def text(self) -> bytes:
        """Return everything in Prometheus's text format."""
        self.flush()
        return generate_latest(self._shown)
