"""The memory store keeps every promise, with times passed in and with its own clock."""

from __future__ import annotations

from headgate import MemoryStore
from headgate.testing import StoreContract
from headgate.testing.contract.base import Contract
from headgate.testing.contract.replay import ReplayTests
from headgate.testing.contract.times import TimeTests


class MemoryContract(Contract):
    def dump(self) -> object:
        assert isinstance(self.store, MemoryStore)
        return self.store._counters.states()


class TestMemoryAtGivenTimes(MemoryContract, ReplayTests, TimeTests):
    def make_store(self) -> MemoryStore:
        return MemoryStore()


class TestMemoryByItsOwnClock(MemoryContract, StoreContract):
    own_time = True

    def make_store(self) -> MemoryStore:
        return MemoryStore(clock=self.clock)
