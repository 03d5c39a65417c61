"""The eight promises, each as a property over random scripts of calls, in every kind of world.

Promise 1 is held against a ledger of all admitted units, promise 6 against a second world in which the hold never was.
`worlds` says what a script and a world are. Where a promise has an edge, a test at plus and minus one microsecond follows.
Memory alone is asked: the conformance kit holds every other store to its answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate import Hold, Limiter, Rule, fixed_window, sliding_log, sliding_window, token_bucket
from headgate.algorithms import TokenBucket, algorithm_for
from tests.unit.worlds import (
    KEYS,
    TIER,
    Op,
    OpKind,
    Outcome,
    World,
    rules_and_scripts,
    scripts,
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
    """The time as the key's state reads it: never before that of the entry before it."""
    units: int


@dataclass
class Ledger:
    """Everything that was ever counted, kept apart from any store. A hold counts at its start."""

    entries: list[Entry] = field(default_factory=list)
    holds: dict[int, Entry] = field(default_factory=dict)

    def note(self, outcome: Outcome, now_us: int, *, rest_is_here: bool = True) -> Entry | None:
        """Enter an outcome; return the entry if something was admitted.

        What a hold cost beyond what was held is entered unless it was counted elsewhere.
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


@in_every_world
@given(case=rules_and_scripts(STRICT, back=True))
def test_no_span_as_long_as_the_period_holds_more_than_the_limit(case: Case, explicit: bool) -> None:
    """In true time, however often the clock is set back; and at the end of each span by the limit then in force."""
    rules, script = case
    period_us = rules[0].quota.period_us
    ledger = Ledger()
    with world(rules, explicit=explicit) as w:
        for op in script:
            outcome = w.play(op)
            if entry := ledger.note(outcome, w.now_us):
                assert outcome.decision is not None
                assert outcome.decision.limit is not None
                in_span = [e for e in ledger.of(op.key) if e.true_us > entry.true_us - period_us]
                assert sum(e.units for e in in_span) <= outcome.decision.limit


@given(case=rules_and_scripts(STRICT, back=True, ops=("hit", "hit", "hold", "record"), keys=1))
def test_a_clock_set_back_stands_still_for_what_was_counted(case: Case) -> None:
    """The same, in the time that the state reads, which waits until the clock has caught up."""
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
def test_a_lenient_window_is_early_by_one_bucket_at_most(case: Case, explicit: bool) -> None:
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


# --- 2. A refusal costs nothing ---------------------------------------------------------------------------------------


@in_every_world
@given(case=rules_and_scripts(ALL, back=True))
def test_a_refusal_or_a_look_writes_nothing(case: Case, explicit: bool) -> None:
    rules, script = case
    with world(rules, explicit=explicit) as w:
        for op in script:
            before = w.states()
            outcome = w.play(op)
            if op.kind == "check" or (outcome.decision is not None and not outcome.decision):
                assert w.states() == before


@in_every_world
@given(case=rules_and_scripts(ALL, back=True))
def test_a_cost_of_nothing_is_admitted_and_writes_nothing(case: Case, explicit: bool) -> None:
    rules, script = case
    with world(rules, explicit=explicit) as w:
        for op in script:
            w.play(op)
        before = w.states()
        for limiter in w.variants:
            assert limiter.hit(KEYS[0], 0, now=w.now())
            hold = limiter.hold(KEYS[0], 0, now=w.now())
            assert hold
            hold.release(now=w.now())
            limiter.record(KEYS[0], 0, now=w.now())
        assert w.states() == before


# --- 3. All or nothing -----------------------------------------------------------------------------------------------

MIXED = (
    sliding_window("4/second", scope="user", buckets=10),
    token_bucket("6/second", burst=3, scope="realm"),
    sliding_log("7/second", scope="*"),
)


@in_every_world
@given(script=scripts(1_000_000, kinds=("hit", "hit", "hold", "settle", "record")))
def test_rules_are_charged_together_or_not_at_all(script: list[Op], explicit: bool) -> None:
    """Each rule is also watched alone, through a limiter of the same name that has only that rule."""
    with world([MIXED], explicit=explicit) as w:
        (limiter,) = w.variants
        alone = [Limiter(rule, name=limiter.name, store=w.store) for rule in MIXED]
        holds: list[Hold] = []
        for op in script:
            w.move(op.advance_us)
            users, realms = {"user": KEYS[op.key]}, {"realm": KEYS[op.variant]}
            keys = (users, realms, None)

            def left() -> list[int | None]:
                return [a.check(k, 0, now=w.now()).remaining for a, k in zip(alone, keys, strict=True)]  # noqa: B023

            cost, before = min(op.cost, 3), left()
            willing = [bool(a.check(k, cost, now=w.now())) for a, k in zip(alone, keys, strict=True)]
            if op.kind == "settle":
                if holds:
                    holds.pop().release(now=w.now())
                continue
            if op.kind == "record":
                limiter.record(users | realms, cost, now=w.now())
                decision = None
            elif op.kind == "hold":
                holds.append(limiter.hold(users | realms, cost, now=w.now()))
                decision = holds[-1].decision
            else:
                decision = limiter.hit(users | realms, cost, now=w.now())
            charged = [b - a for b, a in zip(before, left(), strict=True) if a is not None and b is not None]
            if decision is None:
                assert all(units == min(cost, b or 0) for units, b in zip(charged, before, strict=True))
            else:
                assert decision.allowed == all(willing)
                assert [result.allowed for result in decision.results] == willing
                assert charged == [cost if decision else 0] * 3


# --- 4. One answer ---------------------------------------------------------------------------------------------------


def play_everywhere(rules: list[Rule], script: Sequence[Op]) -> None:
    """Play a script in both worlds and demand the same of each, bit for bit."""
    with ExitStack() as stack:
        worlds = [stack.enter_context(world(rules, explicit=explicit)) for explicit in (True, False)]
        for op in script:
            first, *others = [w.play(op) for w in worlds]
            for other in others:
                assert other == first
            for cost in (0, 1):
                looks = [w.check(KEYS[op.key], cost, op.tier) for w in worlds]
                assert len(set(looks)) == 1


@given(case=rules_and_scripts(ALL, keys=5))
def test_answers_are_the_same_also_where_the_store_has_forgotten(
    case: Case,
) -> None:
    """Only the worlds with a moving clock forget what has become fresh, and nobody can tell."""
    play_everywhere(*case)


@given(case=rules_and_scripts(ALL, keys=1, back=True))
def test_answers_are_the_same_for_a_clock_that_goes_back(
    case: Case,
) -> None:
    play_everywhere(*case)


# --- 5. Honest waiting -----------------------------------------------------------------------------------------------


@in_every_world
@given(case=rules_and_scripts(ALL, back=True), cost=st.integers(1, 5), tier=st.sampled_from([None, TIER]))
def test_retry_after_is_the_first_moment_that_admits(
    case: Case, cost: int, tier: str | None, explicit: bool
) -> None:
    """Above the limit too: the first limiter may have the lower limit, and units are recorded beyond it."""
    rules, script = case
    cost = min(cost, *(algorithm_for(rules[0], rules[0].quota_for(t)).capacity for t in (None, tier)))
    with world(rules, explicit=explicit) as w:
        for op in script:
            w.play(op)
            decision = w.check(KEYS[op.key], cost, tier)
            if not decision:
                wait_us = decision.retry_after_us
                assert wait_us is not None
                assert wait_us >= 1
                assert not w.check(KEYS[op.key], cost, tier, wait_us - 1)
                assert w.check(KEYS[op.key], cost, tier, wait_us)
        if script and not (decision := w.check(KEYS[0], cost, tier)):
            assert decision.retry_after_us is not None
            w.move(decision.retry_after_us)
            assert w.variants[0].hit(KEYS[0], cost, tier=tier, now=w.now())


@in_every_world
@given(case=rules_and_scripts(ALL, back=True), tier=st.sampled_from([None, TIER]))
def test_reset_after_is_the_first_moment_with_nothing_counted(
    case: Case, tier: str | None, explicit: bool
) -> None:
    rules, script = case
    with world(rules, explicit=explicit) as w:
        for op in script:
            w.play(op)
            decision = w.check(KEYS[op.key], 0, tier)
            assert decision.reset_after_us is not None
            fresh = w.check(KEYS[op.key], 0, tier, decision.reset_after_us)
            assert (fresh.remaining, fresh.reset_after_us) == (decision.limit, 0)
            if decision.reset_after_us:
                almost = w.check(KEYS[op.key], 0, tier, decision.reset_after_us - 1)
                assert (almost.remaining != decision.limit, almost.reset_after_us) == (True, 1)


# --- 6. Hold, then settle --------------------------------------------------------------------------------------------


class Charge(NamedTuple):
    """Units that stand in the end, where and when they were charged."""

    at_us: int
    key: str | bytes
    units: int
    tier: str | None
    admitted: bool


def charges(played: Sequence[Outcome], *, refunds: bool = True) -> list[Charge]:
    """Return what was charged as if the true cost of every hold had been known; or as if nothing had been given back."""
    finals = {outcome.hold: outcome.final for outcome in played if outcome.final is not None}
    holds = {outcome.hold: outcome.op for outcome in played if outcome.op.kind == "hold"}
    found = []
    for outcome in played:
        op = outcome.op
        if outcome.final is not None:
            held = holds[outcome.hold]
            found.append(
                Charge(outcome.at_us, KEYS[held.key], max(0, outcome.final - held.cost), held.tier, False)
            )
        elif op.kind == "record":
            found.append(Charge(outcome.at_us, KEYS[op.key], op.cost, op.tier, False))
        elif op.kind in ("hit", "hold") and outcome.decision:
            final = finals.get(outcome.hold, op.cost) if refunds and outcome.hold is not None else op.cost
            found.append(Charge(outcome.at_us, KEYS[op.key], min(op.cost, final), op.tier, True))
    return found


@in_every_world
@given(case=rules_and_scripts(WINDOWS, most_variants=1))
def test_a_settled_hold_of_a_window_leaves_exactly_the_counts_of_its_true_cost(
    case: Case, explicit: bool
) -> None:
    """The second world has hits of the true costs where the first one had holds."""
    rules, script = case
    with (
        world(rules, explicit=explicit) as w,
        world(rules, explicit=explicit) as other,
    ):
        played = [w.play(op) for op in script]
        for charge in charges(played):
            other.move(charge.at_us - other.true_us)
            if charge.admitted:
                assert other.variants[0].hit(charge.key, charge.units, tier=charge.tier, now=other.now())
            else:
                other.variants[0].record(charge.key, charge.units, tier=charge.tier, now=other.now())
        other.move(w.true_us - other.true_us)
        period_us = rules[0].quota.period_us
        for key in KEYS[:2]:
            for later_us in (0, period_us // 60, period_us // 3, period_us // 2, period_us):
                assert w.check(key, 1, None, later_us) == other.check(key, 1, None, later_us)


def level_of(charged: Sequence[Charge], algorithm: TokenBucket, at_us: int) -> int:
    """Return the level of a token bucket, worked out step by step without a store."""
    level, time = 0, 0
    for charge in charged:
        now = charge.at_us // algorithm.tick
        level = max(0, level - algorithm.n * (now - time)) + charge.units * algorithm.d
        time = now
    return max(0, level - algorithm.n * (at_us // algorithm.tick - time))


def level_in(w: World, algorithm: TokenBucket) -> int:
    """Return the exact level of the first key in a world."""
    state = w.state(KEYS[0])
    return 0 if state is None else algorithm._drained(state, w.now_us // algorithm.tick, 0)[1]


HOLDS: tuple[OpKind, ...] = ("hit", "hold", "hold", "settle", "settle", "record")


@in_every_world
@given(case=rules_and_scripts(["token_bucket"], most_variants=1, tiers=False, keys=1, ops=HOLDS))
def test_a_settled_hold_of_a_token_bucket_stays_between_the_levels_with_and_without_it(
    case: Case, explicit: bool
) -> None:
    """Holds overlap and are settled in part. Below is the world that knew the true costs, above the one without refunds."""
    rules, script = case
    algorithm = bucket_of(rules[0])
    played: list[Outcome] = []
    with world(rules, explicit=explicit) as w:
        for op in script:
            played.append(w.play(op))
            below = level_of(charges(played), algorithm, w.true_us)
            above = level_of(charges(played, refunds=False), algorithm, w.true_us)
            assert below <= level_in(w, algorithm) <= above


@in_every_world
@given(
    case=rules_and_scripts(["token_bucket"], most_variants=1, tiers=False, keys=1, ops=("hit", "record")),
    cost=st.integers(1, 5),
    passed_us=st.integers(0, 3_000_000),
    final=st.integers(0, 5),
)
def test_a_hold_of_a_token_bucket_that_nobody_came_near_is_settled_exactly(
    case: Case, cost: int, passed_us: int, final: int, explicit: bool
) -> None:
    rules, script = case
    algorithm = bucket_of(rules[0])
    with world(rules, explicit=explicit) as w:
        played = [w.play(op) for op in script]
        ends = [
            Op("hold", 0, 0, 0, cost, None, 0, 0),
            Op("settle", passed_us, 0, 0, min(cost, final) + 1, None, 0, 0),
        ]
        played += [w.play(op) for op in ends]
        assert level_in(w, algorithm) == level_of(charges(played), algorithm, w.true_us)


def bucket_of(rule: Rule) -> TokenBucket:
    algorithm = algorithm_for(rule)
    assert isinstance(algorithm, TokenBucket)
    return algorithm


@in_every_world
@given(case=rules_and_scripts(ALL, keys=1))
def test_holds_from_before_a_reset_give_nothing_back(case: Case, explicit: bool) -> None:
    rules, script = case
    half = len(script) // 2
    with world(rules, explicit=explicit) as w:
        for op in script[:half]:
            w.play(op)
        w.variants[0].reset(KEYS[0])
        old, w.holds = w.holds, []
        for op in script[half:]:
            w.play(op)
        before = w.states()
        for hold in old:
            hold.release(now=w.now())
        assert w.states() == before


# --- 7. Forgetting is safe -------------------------------------------------------------------------------------------


@given(case=rules_and_scripts(STRICT, keys=5, tiers=False, most_variants=1), max_keys=st.integers(1, 3))
def test_a_full_store_keeps_every_key_to_its_limit_and_forgets_no_live_one(case: Case, max_keys: int) -> None:
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
            # A settlement may come when its key has room of its own, and there count what goes beyond the hold.
            if known and (entry := crowd.note(outcome, w.now_us, rest_is_here=overflowed)):
                in_span = [e for e in crowd.entries if e.true_us > entry.true_us - rule.quota.period_us]
                assert sum(e.units for e in in_span) <= rule.quota.limit


@in_every_world
@given(case=rules_and_scripts(ALL))
def test_a_state_that_is_kept_no_longer_equals_a_fresh_one(case: Case, explicit: bool) -> None:
    """Each state is fresh at the time until which it is kept, for every quota, and not a microsecond earlier for its own."""
    rules, script = case
    algorithms = [algorithm_for(rule, rule.quota_for(tier)) for rule in rules for tier in (None, TIER)]
    with world(rules, explicit=explicit) as w:
        for op in script:
            w.play(op)
            for state in w.states().values():
                at = algorithms[0].fresh_at(state)
                for algorithm in algorithms:
                    fresh = algorithm.decide(None, at, 0, 0)[1]
                    assert algorithm.decide(state, at, 0, 0)[1] == fresh
                assert any(
                    a.decide(state, at - 1, 0, 0)[1] != a.decide(None, at - 1, 0, 0)[1] for a in algorithms
                )


# --- 8. Time going backwards grants nothing ---------------------------------------------------------------------------


@in_every_world
@given(case=rules_and_scripts(ALL, back=True), back_us=st.integers(0, 200_000_000), cost=st.integers(1, 5))
def test_an_earlier_time_never_has_more_to_give(case: Case, back_us: int, cost: int, explicit: bool) -> None:
    """Neither now nor in promises: what is refused now is not admitted sooner by a clock that was set back."""
    rules, script = case
    cost = min(cost, algorithm_for(rules[0]).capacity)
    with world(rules, explicit=explicit) as w:
        for op in script:
            w.play(op)
            now, earlier = (w.check(KEYS[op.key], cost, None, -us) for us in (0, back_us))
            assert now.remaining is not None
            assert earlier.remaining is not None
            assert earlier.allowed <= now.allowed
            if not earlier.allowed and not now.allowed:
                assert (earlier.retry_after_us or 0) - back_us >= (now.retry_after_us or 0)
            left_now, left_earlier = (w.check(KEYS[op.key], 0, None, -us).remaining for us in (0, back_us))
            assert left_now is not None
            assert left_earlier is not None
            assert left_earlier <= left_now


@pytest.mark.parametrize("kind", ALL)
def test_a_clock_that_swings_grants_no_more_than_one_that_stands_still(kind: str) -> None:
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
EDGES = {
    "fixed_window": 60_000_000 - 1_000,  # charged 1 ms into its window
    "sliding_window": 61_000_000 - 1_000,  # of one second for a bucket, 1 ms into it
    "lenient_window": 60_000_000 - 1_000,
    "sliding_log": 60_000_000,
    "token_bucket": 60_000_000,
}


@in_every_world
@pytest.mark.parametrize("kind", ALL)
def test_all_units_are_back_at_the_edge_and_not_a_microsecond_earlier(kind: str, explicit: bool) -> None:
    with world([made(kind)], explicit=explicit) as w:
        (limiter,) = w.variants
        w.move(MINUTE_START_US - w.now_us + 1_000)
        assert limiter.hit("ada", 3, now=w.now())
        refused = limiter.hit("ada", 3, now=w.now())
        assert refused.retry_after_us == refused.reset_after_us == EDGES[kind]
        w.move(EDGES[kind] - 1)
        refused = limiter.hit("ada", 3, now=w.now())
        assert (refused.allowed, refused.retry_after_us) == (False, 1)
        w.move(1)
        admitted = limiter.hit("ada", 3, now=w.now())
        assert (admitted.allowed, admitted.remaining) == (True, 0)


@in_every_world
@pytest.mark.parametrize("kind", STRICT)
def test_the_whole_limit_again_right_after_the_edge_is_still_within_the_promise(
    kind: str, explicit: bool
) -> None:
    """Units at the last instant of a bucket and right after it: the tightest that two bursts can come together."""
    with world([made(kind)], explicit=explicit) as w:
        (limiter,) = w.variants
        w.move(MINUTE_START_US - w.now_us + 999_999)
        assert limiter.hit("ada", 3, now=w.now())
        w.move(60_000_000 - 1)
        assert not limiter.hit("ada", now=w.now())
        w.move(2)
        assert limiter.hit("ada", 3, now=w.now())


def test_a_hold_counts_at_its_start_however_late_it_is_settled() -> None:
    with world([sliding_log("3/minute")]) as w:
        (limiter,) = w.variants
        hold = limiter.hold("ada", 3, now=w.now())
        w.move(60_000_000 - 1)
        hold.settle(2, now=w.now())
        assert not limiter.hit("ada", 2, now=w.now())
        w.move(1)
        assert limiter.hit("ada", 3, now=w.now())


def test_a_hold_of_one_tier_is_not_given_back_in_another() -> None:
    """The level has been converted since, and may have drained at another rate."""
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
def test_callers_who_change_between_tiers_get_no_more_than_the_larger_allows(explicit: bool) -> None:
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
