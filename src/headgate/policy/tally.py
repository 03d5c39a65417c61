"""What shadow rules would have done."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from headgate._fork import watch
from headgate.hooks import logger


class ShadowCount(NamedTuple):
    """What a shadow rule would have done, since it was read or changed, in this process.

    Attributes:
        asked: How many hits and holds it was asked about: those that the live rules admitted. A candidate was asked about
            those that every live rule admitted but the one that it is a candidate for.
        refused: How many of these it would have refused.
        failed: How many it could not say anything about: the store was down, or the key lacks its scope.
        admitted: How many a candidate would have admitted of those that its live rule refused.
    """

    asked: int
    refused: int
    failed: int
    admitted: int = 0


class ShadowTally:
    """Counts what a shadow rule answers; any thread may count."""

    def __init__(self, limiter: str, rule: str) -> None:
        self._limiter = limiter
        self._rule = rule
        self._counts = [0, 0, 0, 0]
        self._has_reported = False
        self._lock = watch(threading.Lock())

    def count(self, *, refused: bool = False, failed: bool = False, was_refused: bool = False) -> None:
        """Count one answer; `was_refused` says that a live rule has refused what the candidate for it was asked."""
        with self._lock:
            self._counts[0] += 1
            self._counts[1] += refused
            self._counts[2] += failed
            self._counts[3] += was_refused and not refused and not failed

    def report(self, error: Exception) -> None:
        """Say, the first time, why the rule could not count."""
        with self._lock:
            if self._has_reported:
                return
            self._has_reported = True
        logger.warning(
            "shadow rule %r of limiter %r could not count a call; this is logged only once: %s",
            self._rule,
            self._limiter,
            error,
        )

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report what the block raises instead of raising it: a shadow must not be felt."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self.report(error)

    def so_far(self) -> ShadowCount:
        """Return the counts."""
        with self._lock:
            return ShadowCount(*self._counts)
