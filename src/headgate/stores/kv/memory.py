"""The key-value store in this process's memory."""

from __future__ import annotations

import heapq
import threading
from collections.abc import AsyncIterator
from typing import NamedTuple

from headgate._fork import watch
from headgate.clock import MICROSECONDS, Clock, SteadyClock, check_clock
from headgate.stores.base import Guarantees


class _MemoryEntry(NamedTuple):
    value: str
    expires: int
    looked_at: int
    """The time of the next check for expiry; the value may be newer than the check."""


class MemoryKV:
    """Keeps values in memory until they expire.

    Args:
        clock: The clock; by default the monotonic clock.
    """

    guarantees = Guarantees(may_lose="everything when the process ends; each process counts for itself")

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock: Clock = check_clock(clock) or SteadyClock()
        self._entries: dict[str, _MemoryEntry] = {}
        self._looks: list[tuple[int, str]] = []
        self._lock = watch(threading.RLock())  # each thread may have an event loop

    async def get(self, key: str) -> str | None:
        entry = self._entries.get(key)
        return entry.value if entry is not None and entry.expires > self._clock.now_us() else None

    async def put(self, key: str, value: str, ttl: int) -> None:
        now = self._clock.now_us()
        with self._lock:
            self._drop_expired(now)
            self._keep(key, value, now + ttl * MICROSECONDS)

    async def swap(self, key: str, expected: str | None, value: str, ttl: int) -> bool:
        with self._lock:
            if await self.get(key) != expected:  # neither call suspends the task
                return False
            await self.put(key, value, ttl)
        return True

    async def delete(self, key: str) -> None:
        with self._lock:
            self._entries.pop(key, None)

    async def list_keys(self, prefix: str = "") -> AsyncIterator[str]:
        for key in [key for key in tuple(self._entries) if key.startswith(prefix)]:
            if await self.get(key) is not None:
                yield key

    async def aclose(self) -> None:
        """Remove all values."""
        with self._lock:
            self._entries.clear()
            self._looks.clear()

    def _keep(self, key: str, value: str, expires: int) -> None:
        before = self._entries.get(key)
        if before is None:
            heapq.heappush(self._looks, (expires, key))
        self._entries[key] = _MemoryEntry(value, expires, expires if before is None else before.looked_at)

    def _drop_expired(self, now: int) -> None:
        while self._looks and self._looks[0][0] <= now:
            looked_at, key = heapq.heappop(self._looks)
            entry = self._entries.get(key)
            if entry is None or entry.looked_at != looked_at:
                continue  # it was deleted, and perhaps created again
            del self._entries[key]
            if entry.expires > now:
                self._keep(key, entry.value, entry.expires)
