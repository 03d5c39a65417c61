"""Waiting for one another: the few primitives that differ between threads and tasks."""

from __future__ import annotations

import asyncio
import threading
import time


class Event:
    """Something that one thread waits for and another brings about, once.

    Waiting and setting are single calls of a lock. So a signal handler that raises in between, in either thread, leaves
    nothing locked, as it could inside of a `threading.Event`, which is written in Python.

    Attributes:
        is_over: Set by the waiter when it does not wait any more.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._is_set = False
        self._blocker = threading.Lock()
        self._blocker.acquire()

    def set(self) -> bool:
        """Bring it about; return false if there is no waiter any more. One thread at a time may call this."""
        if self.is_over:
            return False
        if not self._is_set:
            self._is_set = True
            self._blocker.release()
        return True

    def wait(self, timeout: float) -> bool:
        """Return whether it has happened, waiting up to so many seconds for it."""
        return self._is_set or self._blocker.acquire(timeout=max(0, timeout))

    def time(self) -> float:
        """Return the seconds on the clock that `wait` goes by."""
        return time.monotonic()


class AsyncEvent:
    """Something that one task waits for and another, perhaps of another event loop, brings about, once.

    Attributes:
        is_over: Set by the waiter when it does not wait any more.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._is_set = False
        self._event = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def set(self) -> bool:
        """Bring it about; return false if there is no waiter any more, also because its event loop was closed."""
        if self.is_over or self._loop.is_closed():
            return False
        if not self._is_set:
            try:
                self._loop.call_soon_threadsafe(self._event.set)
            except RuntimeError:  # closed in this moment
                return False
            self._is_set = True
        return True

    async def wait(self, timeout: float) -> bool:
        """Return whether it has happened, waiting up to so many seconds for it."""
        try:
            # Not wait_for: it may swallow a cancellation that comes together with the event.
            async with asyncio.timeout(timeout):
                await self._event.wait()
        except TimeoutError:
            return False
        return True

    def time(self) -> float:
        """Return the seconds on the clock that `wait` goes by."""
        return self._loop.time()
