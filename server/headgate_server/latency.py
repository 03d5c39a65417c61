"""Latency histograms of stores, in bounded memory, that can be summed over workers.

Buckets grow by a factor of 2 ** (1 / 4), so a quantile is at most 19% too high. Only this minute and the one before it
count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import log2

BUCKETS_PER_DOUBLING = 4
MINUTE = 60.0

Times = dict[int, int]
"""Number of calls by bucket."""


@dataclass(slots=True)
class StoreLatency:
    """The latency of a store for one limiter.

    Attributes:
        last: Time of the last answer, in seconds since the epoch; `None` before the first.
        times: The histogram of this minute.
        earlier: The histogram of the minute before.
        begun: When this minute began.
    """

    last: float | None = None
    times: Times = field(default_factory=dict)
    earlier: Times = field(default_factory=dict)
    begun: float = 0.0

    def add(self, seconds: float, now: float) -> None:
        """Add a call that took `seconds`."""
        self.last = now
        if now - self.begun >= MINUTE:
            self._turn(now)
        number = int(log2(seconds * 1e6 + 1) * BUCKETS_PER_DOUBLING)
        self.times[number] = self.times.get(number, 0) + 1

    def recent(self, now: float) -> Times:
        """Return the histogram of the last one to two minutes."""
        if now - self.begun >= MINUTE:
            self._turn(now)
        return total((self.earlier, self.times))

    def _turn(self, now: float) -> None:
        self.earlier = self.times if now - self.begun < 2 * MINUTE else {}
        self.times = {}
        self.begun = now


def total(several: Iterable[Times]) -> Times:
    """Return the sum of several histograms."""
    counts: Counter[int] = Counter()
    for times in several:
        counts.update(times)
    return dict(counts)


def quantile(times: Times, share: float) -> float | None:
    """Return a quantile in seconds; `None` without calls."""
    wanted = sum(times.values()) * share
    for number in sorted(times):
        wanted -= times[number]
        if wanted <= 0:
            return float((2 ** ((number + 1) / BUCKETS_PER_DOUBLING) - 1) / 1e6)
    return None
