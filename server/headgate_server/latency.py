"""When each limiter's store has answered last, and how long it takes: in bounded memory, and such that workers add up.

A time falls into one of a few classes, four to every doubling, so a quantile is at most 19% too high. Only this minute
and the one before it count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import log2

CLASSES_PER_DOUBLING = 4
MINUTE = 60.0

Times = dict[int, int]
"""How many calls took how long, by class."""


@dataclass(slots=True)
class StoreLatency:
    """How a store has answered one limiter.

    Attributes:
        last: When, in seconds since the epoch; `None` if it never did.
        times: Of this minute.
        earlier: Of the minute before.
        begun: When this minute began.
    """

    last: float | None = None
    times: Times = field(default_factory=dict)
    earlier: Times = field(default_factory=dict)
    begun: float = 0.0

    def add(self, seconds: float, now: float) -> None:
        """Take note of an answer."""
        self.last = now
        if now - self.begun >= MINUTE:
            self._turn(now)
        number = int(log2(seconds * 1e6 + 1) * CLASSES_PER_DOUBLING)
        self.times[number] = self.times.get(number, 0) + 1

    def recent(self, now: float) -> Times:
        """Return the times of the last one to two minutes."""
        if now - self.begun >= MINUTE:
            self._turn(now)
        return total((self.earlier, self.times))

    def _turn(self, now: float) -> None:
        self.earlier = self.times if now - self.begun < 2 * MINUTE else {}
        self.times = {}
        self.begun = now


def total(several: Iterable[Times]) -> Times:
    """Return the times of several together."""
    counts: Counter[int] = Counter()
    for times in several:
        counts.update(times)
    return dict(counts)


def quantile(times: Times, share: float) -> float | None:
    """Return the seconds within which this share of the calls was answered; `None` if there were none."""
    wanted = sum(times.values()) * share
    for number in sorted(times):
        wanted -= times[number]
        if wanted <= 0:
            return float((2 ** ((number + 1) / CLASSES_PER_DOUBLING) - 1) / 1e6)
    return None
