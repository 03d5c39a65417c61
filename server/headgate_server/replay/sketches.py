"""Figures about very many things in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar
from zlib import crc32

T = TypeVar("T")

_EXACT_BITS = 13
"""Values up to 2^13 are counted exactly, larger ones to one part in 2^12."""


class Histogram:
    """How often each value occurred: exact below 8192, within 0.03 % above, never too low.

    Attributes:
        total: How many values there are.
        highest: The highest of them, exactly; 0 if there are none.
    """

    def __init__(self) -> None:
        self.total = 0
        self.highest = 0
        self._counts: dict[int, int] = {}

    def add(self, value: int, count: int = 1) -> None:
        """Count a value."""
        self.total += count
        if value > self.highest:
            self.highest = value
        if value >= 1 << _EXACT_BITS:
            value = _rounded_up(value)
        self._counts[value] = self._counts.get(value, 0) + count

    def smallest_with_at_most_above(self, count: int) -> int:
        """Return the smallest value that at most so many were above."""
        left = self.total
        for value in sorted(self._counts):
            left -= self._counts[value]
            if left <= count:
                return min(value, self.highest)
        return 0

    def percentile(self, percent: float) -> int:
        """Return the value that so many per cent were not above; 0 if there are none."""
        return self.smallest_with_at_most_above(int(self.total * (100 - percent) / 100))


def _rounded_up(value: int) -> int:
    shift = value.bit_length() - _EXACT_BITS
    return -(-value >> shift) << shift


class KeySample(Generic[T]):
    """Something about each key: of all keys while they are few, then of a fair sample of them.

    A key is in the sample if its digest ends in enough zero bits. When there are too many, one more bit is asked for, and
    half of them go (Gibbons, 2001). A key that is left was there from its first request on, so what is kept of a key is
    always complete, and the number of all keys is known within a few per cent.

    Args:
        capacity: How many keys are kept at most.
        new: Returns what a new key begins with.
    """

    def __init__(self, capacity: int, new: Callable[[], T]) -> None:
        self._capacity = capacity
        self._new = new
        self._kept: dict[str, T] = {}
        self._mask = 0
        self.get = self._kept.get

    @property
    def is_complete(self) -> bool:
        """Whether every key is kept."""
        return self._mask == 0

    @property
    def keys(self) -> int:
        """How many keys there are; an estimate if not all are kept."""
        return len(self._kept) * (self._mask + 1)

    @property
    def scale(self) -> int:
        """How many keys each kept one stands for."""
        return self._mask + 1

    def add(self, key: str) -> T | None:
        """Return what is kept of a key that `get` does not know; `None` if it is not in the sample."""
        if self._mask and crc32(key.encode("utf-8", "surrogatepass")) & self._mask:
            return None
        kept = self._kept[key] = self._new()
        if len(self._kept) > self._capacity:
            self._thin_out()
            return self._kept.get(key)
        return kept

    def values(self) -> Iterator[T]:
        """Yield what is kept of each key."""
        return iter(self._kept.values())

    def _thin_out(self) -> None:
        while len(self._kept) > self._capacity:
            self._mask = self._mask * 2 + 1
            out = [key for key in self._kept if crc32(key.encode("utf-8", "surrogatepass")) & self._mask]
            for key in out:
                del self._kept[key]


class Timeline:
    """Counts over time, in bins that are as fine as a bounded number of them allows.

    Args:
        width: How many counts a bin has.
    """

    MOST_BINS = 1_500
    _WIDTHS = (1, 10, 60, 300, 900, 3_600, 21_600, 86_400, 604_800, 2_592_000, 31_536_000, 315_360_000)

    def __init__(self, width: int) -> None:
        self._places = width
        self.bins: dict[int, list[int]] = {}
        self.seconds = self._WIDTHS[0]
        self._width_us = self.seconds * 1_000_000
        self._last: tuple[int, list[int]] = (-1, [])

    def at(self, at: int) -> list[int]:
        """Return the counts of the bin that a time in microseconds falls into."""
        index = at // self._width_us
        last, counts = self._last
        if index == last:
            return counts
        if index not in self.bins:
            self.bins[index] = [0] * self._places
            if len(self.bins) > self.MOST_BINS:
                self._widen()
                return self.at(at)
        self._last = index, self.bins[index]
        return self.bins[index]

    def coarser(self, seconds: int) -> list[tuple[int, list[int]]]:
        """Return start (in seconds) and counts of bins at least so wide, in order."""
        return sorted(_merged(self.bins, self.seconds, max(seconds, self.seconds), self._places).items())

    def _widen(self) -> None:
        while len(self.bins) > self.MOST_BINS:
            wider = next(width for width in self._WIDTHS if width > self.seconds)
            merged = _merged(self.bins, self.seconds, wider, self._places)
            self.bins = {start // wider: counts for start, counts in merged.items()}
            self.seconds, self._width_us = wider, wider * 1_000_000
        self._last = (-1, [])


def _merged(bins: dict[int, list[int]], width: int, wider: int, places: int) -> dict[int, list[int]]:
    """Return bins of another width by their start; each old one goes where it begins."""
    merged: dict[int, list[int]] = {}
    for index, counts in bins.items():
        start = index * width // wider * wider
        into = merged.setdefault(start, [0] * places)
        for place, count in enumerate(counts):
            into[place] += count
    return merged
