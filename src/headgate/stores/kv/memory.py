"""The key-value store in this process's memory."""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator
from typing import NamedTuple

from headgate.clock import MICROSECONDS, Clock, SteadyClock
from headgate.stores.base import Guarantees


class _MemoryEntry(NamedTuple):
    value: str
    expires: int


class MemoryKV:
    """Keeps values in memory until their time is up.

    Args:
        clock: Where time comes from; by default the monotonic clock.
    """

    guarantees = Guarantees(may_lose="everything when the process ends; each process counts for itself")

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock: Clock = SteadyClock() if clock is None else clock
        self._entries: dict[str, _MemoryEntry] = {}
        self._expiries: list[tuple[int, str]] = []

    async def get(self, key: str) -> str | None:
        entry = self._entries.get(key)
        return entry.value if entry is not None and entry.expires > self._clock.now_us() else None

    async def put(self, key: str, value: str, ttl: int) -> None:
        now = self._clock.now_us()
        self._drop_expired(now)
        entry = self._entries[key] = _MemoryEntry(value, now + ttl * MICROSECONDS)
        heapq.heappush(self._expiries, (entry.expires, key))

    async def swap(self, key: str, expected: str | None, value: str, ttl: int) -> bool:
        if (
            await self.get(key) != expected
        ):  # neither call gives up control, so no other task comes in between
            return False
        await self.put(key, value, ttl)
        return True

    async def delete(self, key: str) -> None:
        self._entries.pop(key, None)

    async def list_keys(self, prefix: str = "") -> AsyncIterator[str]:
        for key in [key for key in self._entries if key.startswith(prefix)]:
            if await self.get(key) is not None:
                yield key

    async def aclose(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._expiries.clear()

    def _drop_expired(self, now: int) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            expires, key = heapq.heappop(self._expiries)
            entry = self._entries.get(key)
            if entry is not None and entry.expires == expires:  # otherwise it was put again since
                del self._entries[key]
