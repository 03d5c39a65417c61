"""Find the busiest keys in bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

from headgate._checks import check_count
from headgate._fork import watch
from headgate.quota import MAX_UNITS

K = TypeVar("K", bound=Hashable)


class TopKeys(Generic[K]):
    """Approximate counts of the busiest keys among any number of keys (Misra and Gries, 1982).

    A key with more than 1/(capacity + 1) of the total is guaranteed to be included. Its count is too low by at most that
    share, never too high. The average cost of `add` does not depend on the number of keys.

    Args:
        capacity: The number of keys counted at once.
    """

    def __init__(self, capacity: int) -> None:
        check_count("capacity", capacity, 1, MAX_UNITS)
        self.capacity = capacity
        self._counts: dict[K, int] = {}
        self._lock = watch(threading.Lock())

    def add(self, key: K, count: int = 1) -> None:
        """Add to the count of a key."""
        with self._lock:
            counts = self._counts
            if key in counts:
                counts[key] += count
            elif len(counts) < self.capacity:
                counts[key] = count
            else:
                self._make_room(key, count)

    def top(self, number: int) -> list[tuple[K, int]]:
        """Return the busiest keys and their counts, busiest first."""
        check_count("number", number, 0, MAX_UNITS)
        with self._lock:
            counts = list(self._counts.items())
        return sorted(counts, key=lambda item: -item[1])[:number]

    def _make_room(self, key: K, count: int) -> None:
        # Misra-Gries: subtract the minimum from all counts.
        common = min(count, min(self._counts.values()))
        self._counts = {other: left for other, had in self._counts.items() if (left := had - common)}
        if count > common:
            self._counts[key] = count - common
