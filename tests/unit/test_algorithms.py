"""The pure functions: states, receipts and the largest numbers.

The vectors and random traces, both compared with an independent model, show every decision at its edges.
"""

from __future__ import annotations

import pytest

from headgate import CostTooHigh, calendar, fixed_window, sliding_log, sliding_window, token_bucket
from headgate.algorithms import Algorithm, State, TokenBucket, algorithm_for
from headgate.decision import Verdict
from headgate.quota import MAX_UNITS

SECOND = 1_000_000
T0 = 1_700_000_000 * SECOND  # the start of a window of every period used here
BIRTH = 42

FIXED = algorithm_for(fixed_window("3/second"))
STRICT = algorithm_for(sliding_window("3/second", buckets=10))  # buckets of 100,000 us
LENIENT = algorithm_for(sliding_window("3/second", buckets=10, strict=False))
LOG = algorithm_for(sliding_log("3/second"))
BUCKET = algorithm_for(token_bucket("3/second"))
ALL = (FIXED, STRICT, LENIENT, LOG, BUCKET)
every_algorithm = pytest.mark.parametrize(
    "algorithm", ALL, ids=["fixed", "strict", "lenient", "log", "bucket"]
)


def charged(algorithm: Algorithm, *charges: tuple[int, int]) -> State:
    """Return the state after charges of (time since T0, cost), all of them admitted."""
    state: State | None = None
    for at, cost in charges:
        state, verdict = algorithm.decide(state, T0 + at, cost, BIRTH)
        assert verdict.allowed
    assert state is not None
    return state


def verdict_at(algorithm: Algorithm, state: State | None, at: int, cost: int = 1) -> Verdict:
    return algorithm.decide(state, T0 + at, cost, BIRTH)[1]


# --- All algorithms --------------------------------------------------------------------------------------------------


@every_algorithm
def test_fresh_key_has_the_full_limit_and_no_wait(algorithm: Algorithm) -> None:
    assert algorithm.decide(None, T0, 0, BIRTH) == (None, Verdict(True, 3, 3, None, 0))
    assert algorithm.capacity == 3


@every_algorithm
def test_refusal_and_zero_cost_return_the_same_state_object(algorithm: Algorithm) -> None:
    state = charged(algorithm, (0, 3))
    for cost in (0, 1):
        assert algorithm.decide(state, T0, cost, BIRTH)[0] is state
        assert algorithm.decide(state, T0 + 10 * SECOND, 0, BIRTH)[0] is state
    assert algorithm.decide(None, T0, 0, BIRTH)[0] is None


@every_algorithm
def test_new_state_gets_a_new_birth_and_live_state_keeps_its_birth(algorithm: Algorithm) -> None:
    state = charged(algorithm, (0, 1))
    assert state[0] == BIRTH
    kept = algorithm.decide(state, T0, 1, 99)[0]
    renewed = algorithm.decide(state, algorithm.fresh_at(state), 1, 99)[0]
    recorded = algorithm.record(state, algorithm.fresh_at(state), 1, 99)
    assert kept is not None
    assert renewed is not None
    assert recorded is not None
    assert (kept[0], renewed[0], recorded[0]) == (BIRTH, 99, 99)


@every_algorithm
def test_refund_changes_only_the_state_of_its_hold(algorithm: Algorithm) -> None:
    state = charged(algorithm, (0, 2))
    receipt = algorithm.receipt(None, state, 2)
    assert algorithm.refund(None, receipt, 2, T0) is None
    stranger = (BIRTH + 1, *state[1:])
    assert algorithm.refund(stranger, receipt, 2, T0) == stranger
    assert algorithm.refund(state, receipt, 2, T0) is None
    left = algorithm.refund(state, receipt, 1, T0)
    assert verdict_at(algorithm, left, 0, 0).remaining == 2


@every_algorithm
def test_a_count_beyond_the_exact_range_is_refused_in_units(algorithm: Algorithm) -> None:
    unit = algorithm.d if isinstance(algorithm, TokenBucket) else 1
    most = MAX_UNITS // unit
    state = algorithm.record(None, T0, most - 5, BIRTH)
    assert algorithm.record(state, T0, 5, BIRTH) is not None
    with pytest.raises(CostTooHigh) as caught:
        algorithm.record(state, T0, 6, BIRTH)
    assert (caught.value.cost, caught.value.capacity, caught.value.rule) == (6, 5, algorithm.name)


# --- Token bucket ----------------------------------------------------------------------------------------------------


def test_a_token_bucket_does_not_drift() -> None:
    """With 3 per second, the third unit of each second is free exactly at the end of the second."""
    state: State | None = charged(BUCKET, (0, 3))
    at = 0
    for _ in range(3_000):
        wait = verdict_at(BUCKET, state, at).retry_after_us
        assert wait is not None
        at += wait
        state, verdict = BUCKET.decide(state, T0 + at, 1, BIRTH)
        assert verdict.allowed
    assert at == 1_000 * SECOND


TICKS = TokenBucket("x", burst=20, n=1, d=1, tick=1)
"""20 at once, and one unit per microsecond."""


def test_level_too_large_for_a_new_shape_drains_in_the_old_shape() -> None:
    """If the level were cut off at the largest number, callers could lose their debt by changing between quotas."""
    old, new = TokenBucket("x", 10, 1, 1, 1), TokenBucket("x", 4, 1_000, 1_000_000, 1)
    owed = MAX_UNITS // 1_000
    state = old.record(None, 100, owed, BIRTH)
    assert state is not None
    for now in (100, 100 + owed // 2, 99 + owed):
        wait = 100 + owed - now
        assert new.decide(state, now, 1, 7) == (state, Verdict(False, 4, 0, wait, wait))
        assert new.decide(state, now, 0, 7) == (state, Verdict(True, 4, 0, None, wait))
        with pytest.raises(CostTooHigh) as raised:
            new.record(state, now, 1, 7)
        assert raised.value.capacity == 0
    assert new.decide(state, 100 + owed, 4, 7)[1].allowed


def test_total_of_refunds_restarts_before_it_exceeds_the_exact_range() -> None:
    state = (BIRTH, 15, 100, MAX_UNITS - 3, 1, 1, 20)
    receipt = TICKS.receipt(None, state, 10)
    assert TICKS.refund(state, receipt, 3, 100) == (BIRTH, 12, 100, MAX_UNITS, 1, 1, 20)
    reborn = TICKS.refund(state, receipt, 4, 100)
    assert reborn is not None
    assert reborn[0] != BIRTH
    assert reborn[1:4] == (11, 100, 0)
    assert TICKS.refund(reborn, receipt, 4, 100) == reborn


# --- Calendar --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "cost"), [(5, 0), (0, 1)])
def test_empty_calendar_window_is_fresh(limit: int, cost: int) -> None:
    state, verdict = algorithm_for(calendar(f"{limit}/day")).decide(None, T0, cost, BIRTH)
    assert (state, verdict.reset_after_us, verdict.retry_after_us) == (None, 0, None)


def test_used_calendar_window_is_read_until_its_last_microsecond() -> None:
    algorithm = algorithm_for(calendar("5/day"))
    state, verdict = algorithm.decide(None, T0, 1, BIRTH)
    assert state is not None
    end = T0 + (verdict.reset_after_us or 0)
    assert algorithm.fresh_at(state) == end
    assert (algorithm.read(state, T0), algorithm.read(state, T0 - 86_400_000_000)) == (T0, end - 1)
