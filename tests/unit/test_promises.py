"""Properties of single kinds of rules and of the memory store, over random scripts of calls.

The conformance kit proves the eight promises on every store. These tests compare admitted units with a ledger of all calls,
where the kit has no such property.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate import Rule, fixed_window, sliding_log, sliding_window, token_bucket
from headgate.algorithms import algorithm_for
from tests.unit.worlds import (
    KEYS,
    TIER,
    Op,
    Outcome,
    rules_and_scripts,
    world,
)

STRICT = ("sliding_window", "sliding_log")
WINDOWS = (*STRICT, "lenient_window", "fixed_window")
ALL = (*WINDOWS, "token_bucket")
Case = tuple[list[Rule], list[Op]]

SHARE = settings(max_examples=max(1, settings().max_examples // 4))


def in_every_world(test: Callable[..., None]) -> Callable[..., None]:
    """Try a property in both worlds, each with its share of the examples."""
    parametrized: Callable[..., None] = pytest.mark.parametrize(
        "explicit", [True, False], ids=["now", "clock"]
    )(test)
    return SHARE(parametrized) if hasattr(test, "hypothesis") else parametrized


# --- 1. Never too many -----------------------------------------------------------------------------------------------


@dataclass
class Entry:
    """Units that were admitted or recorded."""

    key: int
    true_us: int
    read_us: int
    """The time in the state of the key: never before the time of the previous entry."""
    units: int


@dataclass
class Ledger:
    """All counted units, independent of any store. A hold counts at its start."""

    entries: list[Entry] = field(default_factory=list)
    holds: dict[int, Entry] = field(default_factory=dict)

    def note(self, outcome: Outcome, now_us: int, *, rest_is_here: bool = True) -> Entry | None:
        """Add an outcome; return the entry if units were admitted.

        The cost above the held units is added unless it was counted elsewhere.
        """
        op = outcome.op
        if outcome.final is not None:
            assert outcome.hold is not None
            held = self.holds[outcome.hold]
            if outcome.final > held.units and rest_is_here:
                self._enter(held.key, outcome.at_us, now_us, outcome.final - held.units)
            held.units = min(held.units, outcome.final)
        elif op.kind == "record":
            self._enter(op.key, outcome.at_us, now_us, op.cost)
        elif outcome.decision and op.kind in ("hit", "hold"):
            entry = self._enter(op.key, outcome.at_us, now_us, op.cost)
            if outcome.hold is not None:
                self.holds[outcome.hold] = entry
            return entry
        return None

    def _enter(self, key: int, true_us: int, now_us: int, units: int) -> Entry:
        read_us = max([now_us, *(entry.read_us for entry in self.of(key))])
        self.entries.append(Entry(key, true_us, read_us, units))
        return self.entries[-1]

    def of(self, key: int) -> list[Entry]:
        return [entry for entry in self.entries if entry.key == key]


@given(case=rules_and_scripts(STRICT, back=True, ops=("hit", "hit", "hold", "record"), keys=1))
def test_limit_holds_when_the_clock_is_set_back(case: Case) -> None:
    """The limit holds in the time of the state, which does not move until the clock has caught up."""
    rules, script = case
    period_us = rules[0].quota.period_us
    ledger = Ledger()
    with world(rules) as w:
        for op in script:
            outcome = w.play(op)
            if entry := ledger.note(outcome, w.now_us):
                assert outcome.decision is not None
                assert outcome.decision.limit is not None
                in_span = [e for e in ledger.entries if e.read_us > entry.read_us - period_us]
                assert sum(e.units for e in in_span) <= outcome.decision.limit


@in_every_world
@given(case=rules_and_scripts(["fixed_window"], tiers=False, most_variants=1))
def test_a_fixed_window_never_admits_more_than_its_limit_per_window(case: Case, explicit: bool) -> None:
    (rule,), script = case
    ledger = Ledger()
    with world([rule], explicit=explicit) as w:
        for op in script:
            if entry := ledger.note(w.play(op), w.now_us):
                window = entry.true_us // rule.quota.period_us
                in_window = [e for e in ledger.of(op.key) if e.true_us // rule.quota.period_us == window]
                assert sum(e.units for e in in_window) <= rule.quota.limit


@in_every_world
@given(case=rules_and_scripts(["lenient_window"], tiers=False, most_variants=1))
def test_lenient_window_admits_at_most_one_bucket_early(case: Case, explicit: bool) -> None:
    (rule,), script = case
    width_us = -(rule.quota.period_us // -rule.buckets)
    ledger = Ledger()
    with world([rule], explicit=explicit) as w:
        for op in script:
            if entry := ledger.note(w.play(op), w.now_us):
                since = entry.true_us - (rule.quota.period_us - width_us)
                in_span = [e for e in ledger.of(op.key) if e.true_us > since]
                assert sum(e.units for e in in_span) <= rule.quota.limit


@in_every_world
@given(
    case=rules_and_scripts(
        ["token_bucket"], tiers=False, most_variants=1, back=True, ops=("hit", "hit", "hold", "settle")
    )
)
def test_a_token_bucket_never_admits_more_than_burst_and_rate(case: Case, explicit: bool) -> None:
    (rule,), script = case
    quota = rule.quota
    tick_us = 1 if quota.period_us <= 3_600_000_000 else 1000
    ledger = Ledger()
    with world([rule], explicit=explicit) as w:
        for op in script:
            if ledger.note(w.play(op), w.now_us):
                entries = ledger.of(op.key)
                last = entries[-1].true_us // tick_us * tick_us
                for first, entry in enumerate(entries):
                    passed_us = last - entry.true_us // tick_us * tick_us
                    units = sum(e.units for e in entries[first:])
                    assert (units - (quota.burst or quota.limit)) * quota.period_us <= quota.limit * passed_us


# --- 7. Removal of keys is safe --------------------------------------------------------------------------------------


@given(case=rules_and_scripts(STRICT, keys=5, tiers=False, most_variants=1), max_keys=st.integers(1, 3))
def test_full_store_enforces_every_limit_and_keeps_live_keys(case: Case, max_keys: int) -> None:
    """Per key the limit holds across the overflow key and back; and all keys in overflow share one limit."""
    (rule,), script = case
    ledger = Ledger()
    with world([rule], explicit=False, max_keys=max_keys) as w:
        for op in script:
            own_before = w.state(KEYS[op.key])
            outcome = w.play(op)
            live = {
                key for key, state in w.states().items() if algorithm_for(rule).fresh_at(state) > w.now_us
            }
            if entry := ledger.note(outcome, w.now_us):
                in_span = [e for e in ledger.of(op.key) if e.true_us > entry.true_us - rule.quota.period_us]
                assert sum(e.units for e in in_span) <= rule.quota.limit
            if (
                own_before is not None
                and algorithm_for(rule).fresh_at(own_before) > w.now_us
                and op.kind != "settle"
            ):
                assert (("world", rule.identity), KEYS[op.key]) in live, "a live key was forgotten"
            assert len(w.store) <= max_keys + 1


@given(case=rules_and_scripts(STRICT, keys=5, tiers=False, most_variants=1))
def test_keys_in_overflow_share_one_limit(case: Case) -> None:
    (rule,), script = case
    crowd = Ledger()
    with world([rule], explicit=False, max_keys=1) as w:
        for op in script:
            before = w.store.overflowed
            outcome = w.play(op)
            overflowed = w.store.overflowed > before
            known = outcome.hold in crowd.holds if op.kind == "settle" else overflowed
            # The key may have left the overflow before the settlement; then the units above the hold count in the key.
            if known and (entry := crowd.note(outcome, w.now_us, rest_is_here=overflowed)):
                in_span = [e for e in crowd.entries if e.true_us > entry.true_us - rule.quota.period_us]
                assert sum(e.units for e in in_span) <= rule.quota.limit


# --- 8. Time going backwards grants nothing ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
def test_clock_moving_back_and_forth_admits_no_extra_units(kind: str) -> None:
    """Back and forth by an hour with every call, around an instant at which the limit is used up."""
    with world([made(kind)], explicit=False) as w:
        (limiter,) = w.variants
        assert limiter.hit("ada", 3)
        for swing in range(20):
            w.clock.advance_us(-3_600_000_000 if swing % 2 == 0 else 3_600_000_000)
            refused = limiter.hit("ada")
            assert not refused
            assert refused.retry_after_us is not None
            assert refused.retry_after_us > 0


def made(kind: str) -> Rule:
    """Return a rule of 3 a minute of this kind."""
    if kind == "lenient_window":
        return sliding_window("3/minute", strict=False)
    makers = (fixed_window, sliding_window, sliding_log, token_bucket)
    return next(make for make in makers if make.__name__ == kind)("3/minute")


# --- Through a limiter, one microsecond before, at and after ----------------------------------------------------------

MINUTE_START_US = 1_700_000_040_000_000


@in_every_world
@pytest.mark.parametrize("kind", STRICT)
def test_full_limit_right_after_the_window_edge_keeps_the_promise(kind: str, explicit: bool) -> None:
    """Units at the last instant of a bucket and right after it: two bursts cannot be closer to each other."""
    with world([made(kind)], explicit=explicit) as w:
        (limiter,) = w.variants
        w.move(MINUTE_START_US - w.now_us + 999_999)
        assert limiter.hit("ada", 3, now=w.now())
        w.move(60_000_000 - 1)
        assert not limiter.hit("ada", now=w.now())
        w.move(2)
        assert limiter.hit("ada", 3, now=w.now())


def test_hold_counts_at_its_start_even_if_settled_late() -> None:
    with world([sliding_log("3/minute")]) as w:
        (limiter,) = w.variants
        hold = limiter.hold("ada", 3, now=w.now())
        w.move(60_000_000 - 1)
        hold.settle(2, now=w.now())
        assert not limiter.hit("ada", 2, now=w.now())
        w.move(1)
        assert limiter.hit("ada", 3, now=w.now())


def test_hold_of_one_tier_is_not_refunded_in_another_tier() -> None:
    """The level was converted after the hold, and may have drained at another rate."""
    rule = token_bucket("60/minute", burst=100, tiers={TIER: "60/minute burst 60"})
    left = []
    for held in (50, 0):
        with world([rule]) as w:
            (limiter,) = w.variants
            hold = limiter.hold("ada", held, now=w.now())
            w.move(1_000_000)
            assert limiter.hit("ada", tier=TIER, now=w.now())
            assert limiter.hit("ada", now=w.now())
            hold.release(now=w.now())
            left.append(limiter.check("ada", 0, now=w.now()).remaining)
    assert left == [49, 98]


@in_every_world
def test_changing_tiers_admits_at_most_the_larger_quota(explicit: bool) -> None:
    """When the smaller capacity was written into the state, 919 were admitted where the larger allows 200 at once."""
    rule = token_bucket("60/minute", burst=200, tiers={TIER: "60/minute burst 20"})
    admitted = 0
    with world([rule], explicit=explicit) as w:
        (limiter,) = w.variants
        for seconds in range(60):
            for tier in (None, TIER, None):
                while limiter.hit("ada", tier=tier, now=w.now()):
                    admitted += 1
            assert admitted == 200 + seconds
            w.move(1_000_000)
