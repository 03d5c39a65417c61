"""Whether a store is worth asking."""

from __future__ import annotations

import logging
import os
from itertools import pairwise

import pytest

from headgate import StoreConflict, StoreUnavailable
from headgate.stores.outage import FIRST_PAUSE, LONGEST_PAUSE, Breaker, breaker_of


class Time:
    """A monotonic clock that stands still."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def breaker(time: Time) -> Breaker:
    return Breaker("the store", time)


def fail(breaker: Breaker) -> None:
    ticket = breaker.admit()
    assert ticket is not None
    breaker.failed(ticket, StoreUnavailable("it is gone"))


def probe(breaker: Breaker, time: Time) -> None:
    """Let the next probe be due and succeed."""
    time.now += LONGEST_PAUSE
    assert breaker.wants_probe()
    breaker.probed()


def test_a_store_that_answers_is_asked(breaker: Breaker) -> None:
    for _ in range(3):
        ticket = breaker.admit()
        assert ticket is not None
        breaker.succeeded(ticket)
    assert breaker.is_closed
    assert (breaker.outages, breaker.failures) == (0, 0)


def test_the_first_failure_opens_it(breaker: Breaker) -> None:
    fail(breaker)
    assert not breaker.is_closed
    assert breaker.admit() is None
    assert breaker.admit(charges=False) is None
    assert (breaker.outages, breaker.failures) == (1, 1)
    assert "it is gone" in str(breaker.error())


def test_calls_that_were_under_way_are_counted_but_are_no_new_outage(breaker: Breaker) -> None:
    tickets = [breaker.admit() for _ in range(5)]
    for ticket in tickets:
        assert ticket is not None
        breaker.failed(ticket, StoreUnavailable("it is gone"))
    assert (breaker.outages, breaker.failures) == (1, 5)


def test_one_probe_at_a_time_ever_less_often(breaker: Breaker, time: Time) -> None:
    fail(breaker)
    probes = []
    for tick in range(800):
        time.now = 1000 + tick / 100
        if breaker.wants_probe():
            probes.append(tick / 100)
            assert not breaker.wants_probe()
    pauses = [later - earlier for earlier, later in pairwise([0, *probes])]
    assert pauses == pytest.approx([FIRST_PAUSE, 0.2, 0.4, 0.8, 1.6, LONGEST_PAUSE, LONGEST_PAUSE], abs=0.015)


def test_a_probe_that_succeeds_lets_one_call_through(breaker: Breaker, time: Time) -> None:
    fail(breaker)
    probe(breaker, time)
    assert not breaker.wants_probe()
    ticket = breaker.admit()
    assert ticket is not None
    assert breaker.admit() is None
    breaker.succeeded(ticket)
    assert breaker.is_closed
    assert breaker.admit() is not None


def test_a_trial_that_fails_is_still_the_same_outage(breaker: Breaker, time: Time) -> None:
    fail(breaker)
    probe(breaker, time)
    fail(breaker)
    assert breaker.admit() is None
    assert (breaker.outages, breaker.failures) == (1, 2)
    probe(breaker, time)
    assert breaker.admit() is not None


def test_a_trial_that_is_given_up_is_open_to_another(breaker: Breaker, time: Time) -> None:
    fail(breaker)
    probe(breaker, time)
    ticket = breaker.admit()
    assert ticket is not None
    breaker.gave_up(ticket)
    assert breaker.admit() is not None


def test_giving_up_while_all_is_well_changes_nothing(breaker: Breaker) -> None:
    ticket = breaker.admit()
    assert ticket is not None
    breaker.gave_up(ticket)
    assert breaker.is_closed


def test_looking_proves_nothing(breaker: Breaker, time: Time) -> None:
    """A replica that may not write answers whoever only looks."""
    fail(breaker)
    probe(breaker, time)
    ticket = breaker.admit(charges=False)
    assert ticket is not None
    breaker.succeeded(ticket, charges=False)
    assert not breaker.is_closed
    assert breaker.admit() is not None


def test_a_late_failure_of_the_last_outage_says_nothing_about_now(breaker: Breaker, time: Time) -> None:
    late = breaker.admit()
    assert late is not None
    fail(breaker)
    probe(breaker, time)
    ticket = breaker.admit()
    assert ticket is not None
    breaker.succeeded(ticket)
    breaker.failed(late, StoreUnavailable("still waiting"))
    assert breaker.is_closed


def test_a_late_success_from_before_the_outage_does_not_end_it(breaker: Breaker) -> None:
    late = breaker.admit()
    assert late is not None
    fail(breaker)
    breaker.succeeded(late)
    assert not breaker.is_closed


def test_a_late_probe_of_an_outage_that_is_over_changes_nothing(breaker: Breaker, time: Time) -> None:
    fail(breaker)
    probe(breaker, time)
    ticket = breaker.admit()
    assert ticket is not None
    breaker.succeeded(ticket)
    breaker.probed()
    fail(breaker)
    assert breaker.admit() is None


def test_a_conflict_is_no_outage_and_is_logged_once(
    breaker: Breaker, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        ticket = breaker.admit()
        assert ticket is not None
        breaker.failed(ticket, StoreConflict("a list"))
    assert breaker.is_closed
    assert breaker.failures == 0
    assert [record.getMessage() for record in caplog.records] == [
        "a list; such calls are answered by policy, which is logged only once"
    ]


def test_each_change_is_logged_once(breaker: Breaker, time: Time, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for _ in range(2):
        fail(breaker)
        for _ in range(5):
            probe(breaker, time)
            fail(breaker)
        probe(breaker, time)
        ticket = breaker.admit()
        assert ticket is not None
        breaker.succeeded(ticket)
    unavailable = "'the store' is unavailable, its limiters answer by their policies: it is gone"
    back = "'the store' is back after 12.0 s"
    assert [record.getMessage() for record in caplog.records] == [unavailable, back] * 2


def test_a_store_has_one_breaker() -> None:
    class Store:
        pass

    one, other = Store(), Store()
    assert breaker_of(one) is breaker_of(one)
    assert breaker_of(one) is not breaker_of(other)


def test_a_fork_lets_go_of_locks_that_the_parent_held() -> None:
    class Store:
        pass

    store = Store()
    breaker = breaker_of(store)
    with breaker._lock:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if breaker._lock.acquire(timeout=10) and breaker_of(store) is breaker else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
