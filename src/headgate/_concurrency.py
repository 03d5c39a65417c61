"""Waiting for one another: the few primitives that differ between threads and tasks."""

from __future__ import annotations

import asyncio
import threading


class Event:
    """Something that one thread waits for and another brings about, once."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def wait(self, timeout: float | None) -> bool:
        """Return whether it has happened, waiting up to so many seconds for it."""
        return self._event.wait(timeout)


class AsyncEvent:
    """Something that one task waits for and another, perhaps of another event loop, brings about, once."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def set(self) -> None:
        if self._loop.is_closed():
            return  # whoever waited there is gone
        self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout: float | None) -> bool:
        """Return whether it has happened, waiting up to so many seconds for it."""
        try:
            # Not wait_for: it may swallow a cancellation that comes together with the event.
            async with asyncio.timeout(timeout):
                await self._event.wait()
        except TimeoutError:
            return False
        return True
