"""The memory store keeps every promise, with times passed in and with its own clock."""

from __future__ import annotations

import pytest

from headgate import Limiter, MemoryStore, fixed_window, sliding_log, sliding_window, token_bucket
from headgate.rules import Rule
from headgate.testing import FakeClock, StoreContract
from headgate.testing.contract.base import Contract
from headgate.testing.contract.races import ThreadRaceTests
from headgate.testing.contract.replay import START_US, ReplayTests
from headgate.testing.contract.times import TimeTests
from tests.unit.clocks import steady

RULES = (
    fixed_window("3/minute"),
    sliding_window("3/minute"),
    sliding_log("3/minute"),
    token_bucket("3/minute"),
)
each_rule = pytest.mark.parametrize("rule", RULES, ids=str)


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


class TestMemoryByASteadyClock(MemoryContract, ReplayTests, TimeTests, ThreadRaceTests):
    """The clock of real programs; it never goes back."""

    own_time = True
    effort = 0.4
    test_a_clock_set_back_admits_nothing_more = None
    test_units_counted_after_the_clock_was_set_back_use_the_latest_time = None
    test_vectors_are_answered_to_the_microsecond = None  # in some of them the clock goes back

    def make_store(self) -> MemoryStore:
        self.clock.set_us(START_US)
        return MemoryStore(clock=steady(self.clock))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@each_rule
def test_a_hold_under_the_shared_key_is_released_there(rule: Rule, clock: FakeClock) -> None:
    store = MemoryStore(max_keys=1, clock=clock)
    limiter = Limiter(rule, name="full", store=store)
    limiter.hit("old")
    hold = limiter.hold("new", 2)
    assert limiter.check("newer", 0).remaining == 1
    hold.release()
    assert limiter.check("newer", 0).remaining == 3
    assert limiter.check("old", 0).remaining == 2
