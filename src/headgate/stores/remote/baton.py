"""Waiting for another thread."""

from __future__ import annotations

import threading


class Baton:
    """Something that one thread waits for and another brings about; the two are single calls of a lock.

    So a signal handler that raises in either thread leaves nothing locked, as it could inside of a `threading.Event`.
    """

    __slots__ = ("_blocker",)

    def __init__(self) -> None:
        self._blocker = threading.Lock()
        self._blocker.acquire()

    def wait(self, seconds: float) -> None:
        """Return after `set`, or when the time is up."""
        self._blocker.acquire(timeout=max(0.0, seconds))

    def set(self) -> None:
        """End a wait, or the next one."""
        try:
            self._blocker.release()
        except RuntimeError:
            return  # it has been set, maybe by another thread just now
