"""The memory store keeps every promise to coroutines."""

from __future__ import annotations

from headgate import MemoryStore
from headgate.testing import AsyncStoreContract


class TestAsyncMemoryAtGivenTimes(AsyncStoreContract):
    effort = 0.4

    def make_store(self) -> MemoryStore:
        return MemoryStore()


class TestAsyncMemoryByItsOwnClock(AsyncStoreContract):
    own_time = True
    effort = 0.4

    def make_store(self) -> MemoryStore:
        return MemoryStore(clock=self.clock)
