"""Waking another thread."""

from __future__ import annotations

import threading


class WakeUp:
    """A signal from one thread to another. Setting it ends one wait, or the next one.

    Each method is a single call of a lock, so a signal handler that raises leaves nothing locked, as it could inside
    `threading.Event`.
    """

    __slots__ = ("_blocker",)

    def __init__(self) -> None:
        self._blocker = threading.Lock()
        self._blocker.acquire()

    def wait(self, seconds: float) -> None:
        """Return after `set`, or after `seconds`."""
        self._blocker.acquire(timeout=max(0.0, seconds))

    def set(self) -> None:
        """End a wait, or the next one."""
        try:
            self._blocker.release()
        except RuntimeError:
            return  # it is set already
