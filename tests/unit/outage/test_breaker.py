"""The circuit breaker of a store."""

from __future__ import annotations

import gc
import logging
import os
import weakref

import pytest

from headgate import StoreConflict, StoreError, StoreOverloaded, StoreTimeout, StoreUnavailable
from headgate.outage.breaker import (
    FIRST_PAUSE,
    GRACE,
    LONGEST_PAUSE,
    Breaker,
    Probe,
    breaker_of,
)

DEADLINE = 1.0
GONE = StoreUnavailable("it is gone")


class Time:
    """A monotonic clock that advances only when the test sets it."""

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


def fail(breaker: Breaker) -> Probe:
    """Make a call fail, and return the probe that its caller has to schedule."""
    ticket = breaker.admit()
    assert ticket is not None
    probe = breaker.failed(ticket, GONE)
    assert probe is not None
    return probe


def test_probe_pause_doubles_up_to_a_limit(breaker: Breaker) -> None:
    probe: Probe | None = fail(breaker)
    pauses = []
    for _ in range(6):
        assert probe is not None
        pauses.append(probe.pause)
        probe = breaker.failed(probe.ticket, GONE, is_probe=True)
    assert pauses == [FIRST_PAUSE, 0.2, 0.4, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    assert LONGEST_PAUSE < 1
    assert (breaker.outages, breaker.failures) == (1, 1), "probes are no calls"


def test_a_newer_probe_makes_the_earlier_one_obsolete(breaker: Breaker) -> None:
    first = fail(breaker)
    second = breaker.failed(breaker.ticket, GONE, is_probe=True)
    assert second is not None
    assert first.ticket != breaker.ticket == second.ticket


def test_without_a_prober_one_call_at_a_time_is_admitted(breaker: Breaker, time: Time) -> None:
    """The event loop of the prober was closed, or its thread is in the parent process."""
    fail(breaker)
    time.now += FIRST_PAUSE + DEADLINE + GRACE - 0.01
    assert breaker.admit() is None
    time.now += 0.01
    assert breaker.admit(charges=False) is None, "to look would prove nothing"
    ticket = breaker.admit()
    assert ticket is not None
    assert breaker.admit() is None
    breaker.succeeded(ticket)
    assert breaker.is_closed


def test_failure_of_an_admitted_call_is_the_same_outage(breaker: Breaker, time: Time) -> None:
    fail(breaker)
    time.now += 10
    fail(breaker)
    assert breaker.admit() is None
    assert (breaker.outages, breaker.failures) == (1, 2)


def test_late_failure_from_an_ended_outage_is_ignored(breaker: Breaker) -> None:
    late = breaker.admit()
    assert late is not None
    fail(breaker)
    breaker.succeeded(breaker.ticket)
    assert breaker.failed(late, StoreUnavailable("still waiting")) is None
    assert breaker.is_closed


def test_a_late_success_from_before_the_outage_does_not_end_it(breaker: Breaker) -> None:
    late = breaker.admit()
    assert late is not None
    fail(breaker)
    breaker.succeeded(late)
    assert not breaker.is_closed
    assert not breaker.is_well


# --- Errors that do not open the breaker -----------------------------------------------------------------------------


def test_timeout_of_a_tighter_deadline_only_requests_a_probe(breaker: Breaker, time: Time) -> None:
    assert fail_tight_deadline(breaker) == Probe(0, breaker.ticket)
    assert fail_tight_deadline(breaker) is None, "one probe at a time is enough"
    assert breaker.is_closed
    assert (breaker.outages, breaker.failures) == (0, 2)
    time.now += DEADLINE + GRACE
    assert fail_tight_deadline(breaker) is not None
    breaker.succeeded(breaker.ticket)
    assert fail_tight_deadline(breaker) is not None, "the probe has ended"


def fail_tight_deadline(breaker: Breaker) -> Probe | None:
    return breaker.failed(breaker.ticket, StoreTimeout("late"), is_tight=True)


@pytest.mark.parametrize(
    ("error", "overloads", "line"),
    [
        (
            StoreOverloaded("queue full"),
            3,
            "overload: this process could not send a call in time; it is logged only once: queue full",
        ),
        (StoreConflict("a list"), 0, "a list; such calls are answered by policy, which is logged only once"),
    ],
)
def test_error_without_an_outage_is_logged_once(
    breaker: Breaker, caplog: pytest.LogCaptureFixture, error: StoreError, overloads: int, line: str
) -> None:
    for _ in range(3):
        assert breaker.failed(breaker.ticket, error) is None
    assert breaker.is_closed
    assert (breaker.outages, breaker.failures, breaker.overloads) == (0, 0, overloads)
    assert [record.getMessage() for record in caplog.records] == [line]


def test_each_change_is_logged_once(breaker: Breaker, time: Time, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for _ in range(2):
        fail(breaker)
        for _ in range(5):
            time.now += 2.4
            breaker.failed(breaker.ticket, GONE, is_probe=True)
        for _ in range(3):
            breaker.succeeded(breaker.ticket)
    unavailable = (
        "'the store' is unavailable; until it is back, its limiters answer by their policies: it is gone"
    )
    back = "'the store' is back after 12.0 s"
    assert [record.getMessage() for record in caplog.records] == [unavailable, back] * 2


# --- One per store ---------------------------------------------------------------------------------------------------


class Store:
    pass


def test_breaker_does_not_keep_its_store_alive() -> None:
    store = Store()
    breaker_of(store)
    gone = weakref.ref(store)
    del store
    gc.collect()
    assert gone() is None


def test_child_process_admits_one_call_because_the_prober_stays_in_the_parent(breaker: Breaker) -> None:
    fail(breaker)
    pid = os.fork()
    if pid == 0:
        ticket = breaker.admit()
        os._exit(0 if ticket is not None and breaker.admit() is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert breaker.admit() is None
