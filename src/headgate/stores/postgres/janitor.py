"""The schedule for removing states that equal a fresh one.

Only new states add rows, so each new state pays for the check of two old ones, a few hundred at a time. Every process walks
through the whole table from its last position.
"""

from __future__ import annotations

import threading

from headgate._fork import watch
from headgate.stores.postgres.codec import Arguments

NEW_STATES_PER_CLEANING = 256
ROWS_PER_CLEANING = 512


class Janitor:
    """The progress of the cleaning of one process."""

    def __init__(self) -> None:
        self._new = 0
        self._after = b""
        self._lock = watch(threading.Lock())

    def next(self, new: int) -> Arguments | None:
        """Count new states; if cleaning is due, return the arguments of `headgate_clean_v1`."""
        if not new:
            return None
        with self._lock:
            self._new += new
            if self._new < NEW_STATES_PER_CLEANING:
                return None
            self._new = 0
            return [self._after, b"%d" % ROWS_PER_CLEANING]

    def cleaned(self, last: bytes | None) -> None:
        """Store the last key that was checked; after the end of the table, start again."""
        self._after = last or b""
