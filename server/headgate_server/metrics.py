"""Metrics for Prometheus, of all workers together.

With several workers every process writes its counts into files of a folder that they share, and the worker that is asked
adds them up. `prometheus_client` decides which it is when it is imported, so a worker must have been started with
`METRICS_FOLDER` in its environment. Those files are mapped into memory: to write to a page that the disk has no room for
ends the process (SIGBUS), so room is made for all of it beforehand. If there is none, what cannot be counted is lost, and
nothing else.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client import values as prometheus_values
from prometheus_client.mmap_dict import MmapedDict

from headgate.observe.prometheus import PrometheusHook, ShadowHook, all_processes
from headgate_server.hosting import METRICS_FOLDER

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
    """Make a file with room for the first counts; an empty one must not stay, since it could not be read."""
    with path.open("ab") as file:
        try:
            _reserve(file.fileno(), _FIRST_BYTES)
        except OSError:
            path.unlink()
            raise


def _reserve(descriptor: int, size: int) -> None:
    allocate: Any = getattr(os, "posix_fallocate", None)  # which not every system has
    if allocate is not None:
        allocate(descriptor, 0, size)


class ServerMetrics:
    """The hooks that count, and what they have counted."""

    def __init__(self) -> None:
        if METRICS_FOLDER in os.environ:
            prometheus_values.MmapedDict = ReservedDict  # type: ignore[attr-defined]  # it has no other place for it
        own = CollectorRegistry()
        self.hook = PrometheusHook(own)
        self.shadow_hook = ShadowHook(own)
        self._shown = all_processes(own)
        if self._shown is own:
            ProcessCollector(registry=own)

    def text(self) -> bytes:
        """Return everything in Prometheus's text format."""
        return generate_latest(self._shown)
