"""Watch a policy file for changes.

The file is read and compared every second. It is small, and comparing its text detects changes that times and sizes do not:
editors that replace the file, swapped links (as Kubernetes mounts its ConfigMaps), and a second change within one tick of
the file system.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from headgate._checks import is_number
from headgate.errors import ConfigError
from headgate.policy.live import LiveLimiters

L = TypeVar("L")


class Watching:
    """A thread that watches a policy file; it ends with `stop`, with its `with` block, or with the process."""

    def __init__(self, look: Callable[[], None], every: float) -> None:
        self._look = look
        self._every = every
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headgate-policy", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for its end. Any thread may call this, more than once."""
        self._stopping.set()
        # A function that the thread calls for a new policy may stop it, too.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._every):
            self._look()

    def __enter__(self) -> Watching:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


class AsyncWatched(LiveLimiters[L]):
    """A policy that a task keeps up to date with its file."""

    async def watch(self, every: float = 1.0) -> None:
        """Reload whenever the file changes, until cancelled.

        An invalid file is logged and reported in `last_error`; the previous policy stays in force.

        Args:
            every: Seconds between two reads of the file.

        Raises:
            ConfigError: `every` is not a positive number.
        """
        self._followed()
        _check_pause(every)
        while True:
            await asyncio.sleep(every)
            self._look()


class Watched(LiveLimiters[L]):
    """A policy that a thread keeps up to date with its file."""

    def watch(self, every: float = 1.0) -> Watching:
        """Reload whenever the file changes, in a thread that ends with `stop()` or its `with` block.

        An invalid file is logged and reported in `last_error`; the previous policy stays in force.

        Args:
            every: Seconds between two reads of the file.

        Raises:
            ConfigError: `every` is not a positive number.
        """
        self._followed()
        _check_pause(every)
        return Watching(self._look, every)


def _check_pause(every: float) -> None:
    if not is_number(every) or not 0 < every <= threading.TIMEOUT_MAX:  # also false for NaN
        raise ConfigError(f"every= is seconds above 0, not {every!r}")
