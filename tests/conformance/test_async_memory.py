"""The memory store keeps every promise to coroutines."""

from __future__ import annotations

from headgate import MemoryStore
from headgate.testing import AsyncStoreContract
from headgate.testing.contract.traces import ALL_FEATURES


class TestAsyncMemoryAtGivenTimes(AsyncStoreContract):
    missing_features = ALL_FEATURES
    effort = 0.4

    def make_store(self) -> MemoryStore:
        return MemoryStore()


class TestAsyncMemoryByItsOwnClock(AsyncStoreContract):
    missing_features = ALL_FEATURES
    own_time = True
    effort = 0.4

    def make_store(self) -> MemoryStore:
        return MemoryStore(clock=self.clock)
