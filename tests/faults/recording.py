"""Recorder of a worker's history: it writes each call before it starts, and its outcome when it ends."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from tests.faults.history import HistoryCall, VerdictSeen

Event = Sequence[Any]


class Recorder:
    """Numbers the calls of a worker, and writes their starts and ends; threads may share it.

    Args:
        write: Function that writes one event.
    """

    def __init__(self, write: Callable[[Event], object]) -> None:
        self._write = write
        self._numbers = count()

    def begin(
        self,
        operation: str,
        limiter: str,
        key: str,
        cost: int,
        start: int,
        hold: int | None = None,
        times: int = 1,
    ) -> int:
        """Write the start of a call, and return its number."""
        number = next(self._numbers)
        self._write(("begin", number, operation, limiter, key, cost, start, hold, times))
        return number

    def finish(
        self, number: int, outcome: str, end: int, verdicts: Sequence[Sequence[int | None]] = ()
    ) -> None:
        """Write the outcome of a call."""
        self._write(("end", number, outcome, end, [tuple(fields[:4]) for fields in verdicts]))

    def lower(self, number: int, cost: int, times: int) -> None:
        """Lower the cost and the number of decisions of a call."""
        self._write(("lower", number, cost, times))


def file_writer(path: Path) -> Callable[[Event], object]:
    """Return a function that appends events to a file without buffering, so that `kill -9` loses none of them.

    It waits while the worker's limit on file sizes, which simulates a full disk, prevents writing.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(event: Event) -> None:
        line = json.dumps(event).encode() + b"\n"
        while True:
            try:
                os.write(descriptor, line)
                return
            except OSError as error:
                if error.errno != errno.EFBIG:
                    raise
                time.sleep(0.001)

    return write


def read_file(path: Path, worker: int) -> list[HistoryCall]:
    """Return the calls in a worker's file; ignore an incomplete last line."""
    lines = path.read_bytes().split(b"\n")[:-1]
    return read_calls(map(json.loads, lines), worker)


def read_calls(events: Iterable[Event], worker: int) -> list[HistoryCall]:
    """Return the calls described by the events of a worker."""
    calls: dict[int, HistoryCall] = {}
    for kind, number, *about in events:
        if kind == "begin":
            operation, limiter, key, cost, start, hold, times = about
            calls[number] = HistoryCall(
                worker, number, operation, limiter, key, cost, start, None, "unknown", (), hold, times
            )
        elif kind == "lower":
            calls[number] = calls[number]._replace(cost=about[0], times=about[1])
        else:
            outcome, end, verdicts = about
            seen = tuple(VerdictSeen(*fields) for fields in verdicts)
            calls[number] = calls[number]._replace(outcome=outcome, end=end, verdicts=seen)
    return list(calls.values())
