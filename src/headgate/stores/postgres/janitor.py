"""When to clear away states that equal a fresh one.

Rows come with new states, so clearing them away goes with new states too: for each, two old ones are looked at, a few
hundred at a time. Everybody walks through the whole table, each from where they were.
"""

from __future__ import annotations

import threading

from headgate._fork import watch
from headgate.stores.postgres.codec import Arguments

NEW_STATES_PER_CLEANING = 256
ROWS_PER_CLEANING = 512


class Janitor:
    """Where the cleaning of one process stands."""

    def __init__(self) -> None:
        self._new = 0
        self._after = b""
        self._lock = watch(threading.Lock())

    def next(self, new: int) -> Arguments | None:
        """Count new states; if it is time to clean, return the arguments of `headgate_clean_v1`."""
        if not new:
            return None
        with self._lock:
            self._new += new
            if self._new < NEW_STATES_PER_CLEANING:
                return None
            self._new = 0
            return [self._after, b"%d" % ROWS_PER_CLEANING]

    def cleaned(self, last: bytes | None) -> None:
        """Hear how far the cleaning came; at the end of the table it begins again."""
        self._after = last or b""
