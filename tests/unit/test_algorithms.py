"""The pure functions, one microsecond before, at and after each edge.

The conformance suite compares whole histories with an independent model, and `test_promises` checks the promises. The
tests here check the edges with explicit numbers.
"""

from __future__ import annotations

import pytest

from headgate import CostTooHigh, calendar, fixed_window, sliding_log, sliding_window, token_bucket
from headgate.algorithms import Algorithm, Receipt, State, TokenBucket, algorithm_for, decide_all
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
def test_a_refund_is_never_more_than_was_held(algorithm: Algorithm) -> None:
    first = charged(algorithm, (0, 2))
    state = charged(algorithm, (0, 2), (0, 1))
    after = algorithm.refund(state, algorithm.receipt(None, first, 2), 3, T0)
    assert verdict_at(algorithm, after, 0, 0).remaining == 2


@every_algorithm
def test_a_count_beyond_the_exact_range_is_refused_in_units(algorithm: Algorithm) -> None:
    unit = algorithm.d if isinstance(algorithm, TokenBucket) else 1
    most = MAX_UNITS // unit
    state = algorithm.record(None, T0, most - 5, BIRTH)
    assert algorithm.record(state, T0, 5, BIRTH) is not None
    with pytest.raises(CostTooHigh) as caught:
        algorithm.record(state, T0, 6, BIRTH)
    assert (caught.value.cost, caught.value.capacity, caught.value.rule) == (6, 5, algorithm.name)


# --- Fixed window ----------------------------------------------------------------------------------------------------


def test_a_fixed_window_ends_at_its_edge() -> None:
    state = charged(FIXED, (999_999, 3))
    assert verdict_at(FIXED, state, 999_999) == Verdict(False, 3, 0, 1, 1)
    assert verdict_at(FIXED, state, SECOND) == Verdict(True, 3, 2, None, SECOND)


def test_a_fixed_window_counts_a_clock_set_back_in_the_later_window() -> None:
    state = charged(FIXED, (SECOND, 3))
    assert verdict_at(FIXED, state, 999_999) == Verdict(False, 3, 0, SECOND + 1, SECOND + 1)
    after = FIXED.record(state, T0, 1, 7)
    assert after == (BIRTH, T0 // SECOND + 1, 4)


# --- Sliding windows and the log -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "charged_at", "free_at"),
    [
        (STRICT, 0, 1_100_000),
        (STRICT, 99_999, 1_100_000),
        (STRICT, 100_000, 1_200_000),
        (LENIENT, 0, 1_000_000),
        (LENIENT, 99_999, 1_000_000),
        (LENIENT, 100_000, 1_100_000),
        (LOG, 0, 1_000_000),
        (LOG, 99_999, 1_099_999),
    ],
)
def test_unit_counts_until_its_bucket_expires(algorithm: Algorithm, charged_at: int, free_at: int) -> None:
    state = charged(algorithm, (charged_at, 3))
    assert verdict_at(algorithm, state, free_at - 1) == Verdict(False, 3, 0, 1, 1)
    assert verdict_at(algorithm, state, free_at).remaining == 2
    assert verdict_at(algorithm, state, free_at).allowed


def test_bucket_width_is_rounded_up() -> None:
    """10 per second in 60 buckets: 16,667 us each, so that 60 of them are not shorter than the period."""
    algorithm = algorithm_for(sliding_window("10/s"))
    start = -(T0 % 16_667)  # of a bucket, relative to T0
    state = charged(algorithm, (start + 16_666, 10))
    assert not verdict_at(algorithm, state, start + 16_667 + SECOND - 1).allowed
    assert verdict_at(algorithm, state, start + 16_667 + SECOND).allowed


def test_a_clock_set_back_frees_no_units() -> None:
    """The bucket at 1.5 s has replaced the bucket at 0 s; a clock set back to 0.5 s does not free its units."""
    state = charged(LOG, (0, 1), (1_500_000, 3))
    assert len(state) == 3
    assert not verdict_at(LOG, state, 500_000).allowed
    assert not verdict_at(LOG, state, 2_499_999).allowed
    assert verdict_at(LOG, state, 2_500_000).allowed


def test_refund_is_taken_from_the_bucket_that_was_charged() -> None:
    first = charged(LOG, (0, 1))
    held = charged(LOG, (0, 1), (10, 2))
    receipt = LOG.receipt(first, held, 2)
    assert LOG.refund(held, receipt, 1, T0 + 10) == (BIRTH, T0, 1, T0 + 10, 1)
    assert LOG.refund(held, receipt, 2, T0 + 10) == (BIRTH, T0, 1)
    assert LOG.refund(held, LOG.receipt(None, first, 1), 1, T0 + 10) == (BIRTH, T0 + 10, 2)


# --- Token bucket ----------------------------------------------------------------------------------------------------


def test_token_bucket_admits_again_after_exactly_one_drained_unit() -> None:
    state = charged(BUCKET, (0, 3))
    assert verdict_at(BUCKET, state, 0) == Verdict(False, 3, 0, 333_334, SECOND)
    assert verdict_at(BUCKET, state, 333_333) == Verdict(False, 3, 0, 1, 666_667)
    assert verdict_at(BUCKET, state, 333_334) == Verdict(True, 3, 0, None, SECOND)


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


def test_token_bucket_keeps_its_remaining_units_when_the_clock_is_set_back() -> None:
    state = charged(BUCKET, (SECOND, 1))
    for back in (1, SECOND, 1000 * SECOND):
        after, verdict = BUCKET.decide(state, T0 + SECOND - back, 2, BIRTH)
        assert verdict == Verdict(True, 3, 0, None, SECOND + back)
        assert after == charged(BUCKET, (SECOND, 3))


def test_token_bucket_refund_excludes_drained_units() -> None:
    """Hold 3 of 3 for a third of a second: 1 unit has drained, and without the hold the bucket could not have used it."""
    state = charged(BUCKET, (0, 3))
    receipt = BUCKET.receipt(None, state, 3)
    assert BUCKET.refund(state, receipt, 3, T0 + 333_334) is None
    later = charged(BUCKET, (0, 3), (333_334, 1))
    after = BUCKET.refund(later, receipt, 3, T0 + 333_334)
    assert verdict_at(BUCKET, after, 333_334, 0).remaining == 2


TICKS = TokenBucket("x", burst=20, n=1, d=1, tick=1)
"""20 at once, and one unit per microsecond."""


def held(state: State | None, now: int, cost: int) -> tuple[State, Receipt]:
    """Return the state of `TICKS` after a hold, and its receipt."""
    after, verdict = TICKS.decide(state, now, cost, BIRTH)
    assert verdict.allowed
    assert after is not None
    return after, TICKS.receipt(state, after, cost)


def test_overlapping_holds_refund_at_most_the_held_units() -> None:
    """Two holds of 10 at once, burst 20, one unit a tick; release one, wait 5, hit 10, release the other."""
    first, receipt_a = held(None, 0, 10)
    both, receipt_b = held(first, 0, 10)
    state = TICKS.refund(both, receipt_a, 10, 0)
    state, verdict = TICKS.decide(state, 5, 10, 7)
    assert verdict.allowed
    assert state == (BIRTH, 15, 5, 10, 1, 1, 20)
    assert TICKS.refund(state, receipt_b, 10, 5) == (
        BIRTH,
        10,
        5,
        15,
        1,
        1,
        20,
    )  # as if there had been only the hit


def test_hold_refunds_its_remaining_units_after_a_later_hold_was_refunded() -> None:
    """The total of refunds is subtracted from the level before the hold, not from the hold itself."""
    first, receipt_a = held(None, 0, 10)
    both, receipt_b = held(first, 0, 10)
    hit, _ = TICKS.decide(both, 5, 5, 7)
    state = TICKS.refund(hit, receipt_b, 10, 5)
    assert state == (BIRTH, 10, 5, 10, 1, 1, 20)
    assert TICKS.refund(state, receipt_a, 10, 5) == (
        BIRTH,
        5,
        5,
        15,
        1,
        1,
        20,
    )  # as if there had been only the hit


def test_partial_refund_drains_the_kept_units_first() -> None:
    state, receipt = held(None, 0, 10)
    assert TICKS.refund(state, receipt, 7, 5) is None  # 3 stayed, and have drained within 5 ticks
    # 6 stayed, of which 5 have drained. The time is still that of the charge, so that a clock set back gains nothing.
    assert TICKS.refund(state, receipt, 4, 5) == (BIRTH, 6, 0, 4, 1, 1, 20)


def test_released_hold_restores_the_previous_state() -> None:
    """The time is restored too; otherwise, after a clock set back, the bucket would count as drained until the hold."""
    before, _ = held(None, 0, 10)
    outer, receipt_a = held(before, 3, 4)
    inner, receipt_b = held(outer, 5, 2)
    assert receipt_b == (BIRTH, 9, 5, 0, 3, 1, 1, 20, 2)
    assert TICKS.refund(inner, receipt_b, 2, 6) == outer
    assert TICKS.refund(outer, receipt_a, 4, 6) == before
    assert TICKS.refund(outer, receipt_a, 4, 9) == before
    assert TICKS.refund(outer, receipt_a, 4, 10) is None


def test_release_keeps_the_time_of_a_later_charge() -> None:
    """Otherwise, after a clock set back, the other hold would be refunded as if it had not drained before the charge."""
    first, receipt_a = held(None, 0, 5)
    both, receipt_b = held(first, 0, 5)
    hit, _ = TICKS.decide(both, 5, 5, 7)
    state = TICKS.refund(hit, receipt_b, 5, 5)
    assert state == (BIRTH, 5, 5, 5, 1, 1, 20)
    assert TICKS.refund(state, receipt_a, 5, 0) == state
    assert TICKS.decide(state, 5, 0, 7)[1].remaining == 15


def test_changed_shape_rounds_the_level_up_and_keeps_debt() -> None:
    old, new = TokenBucket("x", 10, 1, 3, 1), TokenBucket("x", 4, 1, 2, 1)
    state = (BIRTH, 4, 100, 0, 1, 3, 10)  # 4/3 of a unit
    assert new.record(state, 100, 0, 7) == (7, 3, 100, 0, 1, 2, 4)  # 3/2 of a unit, not 2.67/2
    full, _ = old.decide(None, 100, 10, BIRTH)
    assert new.record(full, 100, 0, 7) == (7, 20, 100, 0, 1, 2, 4)  # 10 units, 6 beyond the burst


def test_wait_is_exact_when_the_level_exceeds_the_burst_of_another_tier() -> None:
    large, small = TokenBucket("x", 200, 1, 1, 1), TokenBucket("x", 20, 1, 3, 1)
    state, _ = large.decide(None, 100, 200, BIRTH)
    # 200 units are 600 parts here, and 57 may stay; but all is gone in 200 ticks in the shape that it was taken in.
    assert small.decide(state, 100, 1, 7)[1] == Verdict(False, 20, 0, 200, 200)
    assert not small.decide(state, 299, 1, 7)[1].allowed
    assert small.decide(state, 300, 1, 7)[1] == Verdict(True, 20, 19, None, 3)
    fast = TokenBucket("x", 20, 7, 2, 1)  # 3.5 units per tick
    assert fast.decide(state, 100, 1, 7)[1] == Verdict(False, 20, 0, 52, 58)  # 362 of 400 parts, at 7 a tick
    assert not fast.decide(state, 151, 1, 7)[1].allowed
    assert fast.decide(state, 152, 1, 7)[1].allowed


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


def test_state_drained_in_its_shape_is_fresh_in_every_shape() -> None:
    fast, slow = TokenBucket("x", 10, 10, 1, 1), TokenBucket("x", 10, 1, 10, 1)
    state, _ = fast.decide(None, 0, 10, BIRTH)
    assert state is not None
    assert fast.fresh_at(state) == 1
    assert slow.decide(state, 0, 1, 7)[1] == Verdict(False, 10, 0, 1, 1)
    assert slow.decide(state, 1, 1, 7)[1].remaining == 9


def test_changed_shape_ends_earlier_holds() -> None:
    """A converted level may have drained at another rate, so the share of each hold is unknown."""
    large, small = TokenBucket("x", 100, 1, 1, 1), TokenBucket("x", 60, 5, 1, 1)
    state, _ = large.decide(None, 0, 50, BIRTH)
    assert state is not None
    receipt = large.receipt(None, state, 50)
    converted, _ = small.decide(state, 1, 1, 7)
    assert converted == (7, 46, 1, 0, 5, 1, 60)
    assert small.refund(converted, receipt, 50, 1) == converted
    back, _ = large.decide(converted, 1, 1, 8)
    assert back == (8, 47, 1, 0, 1, 1, 100)
    assert large.refund(back, receipt, 50, 1) == back


def test_hold_after_a_shape_change_has_no_earlier_time() -> None:
    large, small = TokenBucket("x", 100, 1, 1, 1), TokenBucket("x", 60, 5, 1, 1)
    state, _ = large.decide(None, 0, 50, BIRTH)
    after, _ = small.decide(state, 1, 1, 7)
    assert after is not None
    receipt = small.receipt(state, after, 1)
    assert receipt == (7, 45, 1, 0, 1, 5, 1, 60, 1)
    assert small.refund(after, receipt, 1, 1) == (7, 45, 1, 0, 5, 1, 60)


def test_total_of_refunds_restarts_before_it_exceeds_the_exact_range() -> None:
    state = (BIRTH, 15, 100, MAX_UNITS - 3, 1, 1, 20)
    receipt = TICKS.receipt(None, state, 10)
    assert TICKS.refund(state, receipt, 3, 100) == (BIRTH, 12, 100, MAX_UNITS, 1, 1, 20)
    reborn = TICKS.refund(state, receipt, 4, 100)
    assert reborn is not None
    assert reborn[0] != BIRTH
    assert reborn[1:4] == (11, 100, 0)
    assert TICKS.refund(reborn, receipt, 4, 100) == reborn


# --- Several rules together ------------------------------------------------------------------------------------------


def test_several_rules_are_all_charged_or_none() -> None:
    states = [None, charged(LOG, (0, 2)), None]
    rules = [FIXED, LOG, BUCKET]
    after, verdicts = decide_all(rules, states, T0, (1, 1, 1), BIRTH)
    assert [verdict.allowed for verdict in verdicts] == [True, True, True]
    assert None not in after
    same, verdicts = decide_all(rules, states, T0, (2, 2, 2), BIRTH)
    assert same is states
    assert [verdict.allowed for verdict in verdicts] == [True, False, True]
    assert [verdict.remaining for verdict in verdicts] == [3, 1, 3]  # remaining units without this call


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
