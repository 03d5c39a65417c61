"""The effects of time: waiting, expiry, clocks that go back; and limits that are never exceeded."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from headgate import Decision, Hold, Limiter, Quota, Rule
from headgate.errors import CostTooHigh
from headgate.keys import Key
from headgate.rules import Kind
from headgate.testing.contract.base import each_kind
from headgate.testing.contract.decisions import DecisionTests
from headgate.testing.contract.traces import START_US, Actor, Feature, Trace, traces

OTHER_KEYS = 300
PENALTY: frozenset[Feature] = frozenset(("penalty",))
"""Enough new keys for a store that examines a few old keys with each new one to have examined all of them."""


_QUOTAS = st.tuples(st.sampled_from((1, 7, 10, 60, 100, 3600)), st.sampled_from((1, 5, 12, 200)))
_Turn = tuple[int, str, int, int, bool]
"""The version of the rules, the tier, the time since the last turn, the cost, and whether it is a hold."""

_PLAY = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from("abc"),
        st.sampled_from((0, 0, 1, 16_667, 999_999, 5_000_000, 30_000_000, 61_000_000)),
        st.sampled_from((1, 1, 3, 5, 12, 100)),
        st.booleans(),
    ),
    max_size=30,
)


class TimeTests(DecisionTests):
    """Exact retry times, limits that are never exceeded, expiry, a clock that goes back."""

    @each_kind
    def test_a_refused_call_is_admitted_at_retry_after_and_not_a_microsecond_before(self, kind: str) -> None:
        limiter = self.limiter(self.rule(kind, 3, 7_000))
        for cost in (1, 2, 3, 2, 3, 1):
            while limiter.hit("a", cost):
                self.clock.advance_us(111)
            self._check_retry_after(limiter, "a", cost)

    @each_kind
    def test_retry_after_is_exact_after_the_limit_was_lowered(self, kind: str) -> None:
        wide = self.limiter(self.rule(kind, 20))
        narrow = self.limiter(self.rule(kind, 3), name=wide.name)
        for _ in range(4):
            wide.hit("a", 5)
            self.clock.advance_us(1_000_001)
        self._check_retry_after(narrow, "a", 2)

    def test_retry_after_is_exact_in_random_traces(self) -> None:
        most_rules = 3 if self.store.guarantees.all_or_nothing else 1
        self.for_all(traces(self.kinds, most_rules=most_rules, most_steps=12), self._check_waits)

    def test_retry_after_is_exact_in_random_traces_with_a_penalty(self) -> None:
        self.need("penalty")
        self.require("all_or_nothing")
        self.for_all(traces(self.kinds, most_rules=2, most_steps=12, features=PENALTY), self._check_waits)

    def _check_waits(self, trace: Trace) -> None:
        self.clock.set_us(START_US)
        name = self.limiter(*trace.versions[0]).name
        limiters = [self.limiter(*rules, name=name) for rules in trace.versions]
        actor = Actor(trace, limiters)
        last: Decision | None = None
        for step in trace.steps:
            self.clock.set_us(step.move.target(self.clock.now_us(), trace.period_us, last))
            answer = actor.play(step)[0]
            if answer is CostTooHigh:
                continue
            assert isinstance(answer, Decision)
            last = answer
            if step.op in ("hit", "check", "hold") and answer.retry_after_us is not None:
                limiter, key = limiters[step.version], trace.key(step.who)
                self.clock.advance_us(answer.retry_after_us - 1)
                early = limiter.check(key, step.cost, tier=step.tier)
                assert (early.allowed, early.retry_after_us) == (False, 1)
                self.clock.advance_us(1)
                last = limiter.hit(key, step.cost, tier=step.tier)
                assert last.allowed

    def test_the_limit_is_never_exceeded_in_random_traces(self) -> None:
        self.for_all(traces(self.kinds, most_rules=1, backwards=False), self._check_limit)

    def _check_limit(self, trace: Trace) -> None:
        """Log everything that was admitted and not returned, and check the sum over every span."""
        rule = replace(trace.versions[0][0], scope=None, tiers={})
        trace = Trace(((rule,), (rule,)), trace.steps)
        log = self._admitted(trace, self.limiter(rule))
        for key in {key for key, _, _ in log}:
            charges = [(at, units) for k, at, units in log if k == key]
            for first, (start, _) in enumerate(charges):
                total = 0
                for end, units in charges[first:]:
                    total += units
                    assert total <= _most_between(rule, start, end), charges

    def _admitted(self, trace: Trace, limiter: Limiter) -> list[tuple[Key, int, int]]:
        """Return key, time and units of all admissions, without units returned later."""
        self.clock.set_us(START_US)
        log: list[tuple[Key, int, int]] = []
        holds: list[tuple[Hold, int]] = []
        last: Decision | None = None
        for step in trace.steps:
            self.clock.set_us(step.move.target(self.clock.now_us(), trace.period_us, last))
            key, cost = trace.key(step.who), min(step.cost, limiter.rules[0].quota.burst or 12)
            if step.op in ("settle", "release") and holds:
                hold, place = holds.pop(step.hold % len(holds))
                kept = hold.settle(min(cost, log[place][2]) if step.op == "settle" else 0)
                log[place] = (*log[place][:2], kept)
                continue
            try:
                taken = limiter.hold(key, cost) if step.op == "hold" else None
                last = limiter.hit(key, cost) if taken is None else taken.decision
            except CostTooHigh:
                continue
            if last.allowed:
                log.append((key, self.clock.now_us(), cost))
                if taken is not None:
                    holds.append((taken, len(log) - 1))
        return log

    def test_switching_quotas_admits_no_more_than_the_largest_quota(self) -> None:
        """With tiers, reloads that change every limit, and callers' own quotas, in any order."""
        rules = st.tuples(st.sampled_from(self.kinds), st.lists(_QUOTAS, min_size=4, max_size=4), _PLAY)
        self.for_all(rules, self._check_quota_changes)

    def _check_quota_changes(self, example: tuple[Kind, list[tuple[int, int]], list[_Turn]]) -> None:
        """Log all admissions, and check every span against the largest limit and burst of its quotas."""
        kind, drawn, turns = example
        quotas = [Quota(n, 60_000_000, burst if kind == "token_bucket" else None) for n, burst in drawn]
        self.clock.set_us(START_US)
        first = self.limiter(self.rule(kind, 1, tiers=dict(zip("abc", quotas[:3], strict=True))))
        again = self.rule(kind, 1, tiers=dict(zip("abc", quotas[1:], strict=True)))
        limiters, log = (first, self.limiter(again, name=first.name)), []
        for version, tier, wait, cost, holds in turns:
            self.clock.advance_us(wait)
            quota = quotas["abc".index(tier) + version]
            try:
                call = limiters[version].hold if holds else limiters[version].hit
                admitted = bool(call("a", cost, tier=tier))
            except CostTooHigh:
                continue
            if admitted:
                log.append((self.clock.now_us(), cost, quota))
        for start in range(len(log)):
            for end in range(start, len(log)):
                span = log[start : end + 1]
                bursts = [q.limit if q.burst is None else q.burst for _, _, q in span]
                best = Quota(
                    max(q.limit for _, _, q in span),
                    60_000_000,
                    max(bursts) if kind == "token_bucket" else None,
                )
                most = _most_between(self.rule(kind, best.limit, burst=best.burst), span[0][0], span[-1][0])
                assert sum(units for _, units, _ in span) <= most, span

    @each_kind
    def test_a_state_is_fresh_at_reset_after_and_not_a_microsecond_before(self, kind: str) -> None:
        limiter = self.limiter(self.rule(kind, 3, 7_000))
        fresh = limiter.check("a", 0)
        limiter.hit("a", 1)
        self.clock.advance_us(1_234)
        reset_after = limiter.hit("a", 1).reset_after_us
        assert reset_after is not None
        self.clock.advance_us(reset_after - 1)
        assert limiter.check("a", 0).reset_after_us == 1
        assert limiter.check("a", 0).remaining != fresh.remaining
        self.clock.advance_us(1)
        assert limiter.check("a", 0) == fresh
        assert limiter.hit("a", 3).allowed

    @each_kind
    def test_live_counts_are_never_forgotten(self, kind: str) -> None:
        """With any number of other keys in between, up to the last microsecond."""
        limiter = self.limiter(self.rule(kind, 3, 60_000))
        limiter.record("a", 5)
        before = limiter.check("a", 0)
        assert before.reset_after_us is not None
        self.clock.advance_us(before.reset_after_us - 1)
        for number in range(OTHER_KEYS):
            limiter.hit(f"other {number}")
        assert limiter.check("a", 0).reset_after_us == 1
        self.clock.advance_us(1)
        assert limiter.check("a", 0).reset_after_us == 0

    def test_a_state_fresh_for_one_tier_is_fresh_for_all(self) -> None:
        """Otherwise callers could see whether a store has already deleted it."""
        fast, slow = (self.rule("token_bucket", limit, burst=100).quota for limit in (100, 10))
        limiter = self.limiter(self.rule("token_bucket", 10, burst=100, tiers={"fast": fast, "slow": slow}))
        limiter.hit("a", 100, tier="fast")
        self.clock.advance_us(60_000_000 - 1)
        assert limiter.check("a", 0, tier="slow").remaining == 9
        assert limiter.check("a", 50, tier="slow").retry_after_us == 1
        for number in range(OTHER_KEYS):
            limiter.hit(f"other {number}")
        self.clock.advance_us(1)
        assert limiter.check("a", 0, tier="slow").remaining == 100

    @each_kind
    def test_a_clock_set_back_admits_nothing_more(self, kind: str) -> None:
        limiter = self.limiter(self.rule(kind, 4, 60_000_000))
        limiter.hit("a", 3)
        self.clock.advance_us(30_000_000)
        limiter.record("a", 2)
        before = limiter.check("a", 0)
        for back in (1, 10_000_000, 20_000_000, 3_600_000_000):
            self.clock.advance_us(-back)
            answer = limiter.check("a", 0)
            assert (answer.remaining, answer.limit) == (before.remaining, before.limit)
            refused = limiter.hit("a", 4)
            assert not refused
            assert refused.retry_after_us is not None
        self._check_retry_after(limiter, "a", 4)

    @each_kind
    def test_a_clock_set_back_after_a_release_admits_nothing_more(self, kind: str) -> None:
        limiter = self.limiter(self.rule(kind, 4, 60_000_000))
        for ahead in (0, 1_000_000, 30_000_000):
            limiter.reset("a")
            limiter.hit("a", 3)
            self.clock.advance_us(ahead)
            limiter.hold("a", 1).release()
            now = limiter.check("a", 0)
            assert now.remaining is not None
            for back in (1, 10_000_000, 3_600_000_000):
                self.clock.advance_us(-back)
                earlier = limiter.check("a", 0)
                assert earlier.remaining is not None
                assert earlier.remaining <= now.remaining
                assert not limiter.hit("a", now.remaining + 1)
                self.clock.advance_us(back)

    def test_an_earlier_time_never_admits_more_in_random_traces(self) -> None:
        every = traces(self.kinds, most_rules=1, most_steps=12, features=self.features - {"units"})
        self.for_all(every, self._has_no_more_earlier)

    def test_an_earlier_time_ends_no_penalty_in_random_traces(self) -> None:
        self.need("penalty")
        self.require("all_or_nothing")
        every = traces(self.kinds, most_rules=2, most_steps=12, features=PENALTY)
        self.for_all(every, self._has_no_more_earlier)

    def _has_no_more_earlier(self, trace: Trace) -> None:
        self.clock.set_us(START_US)
        name = self.limiter(*trace.versions[0]).name
        limiters = [self.limiter(*rules, name=name) for rules in trace.versions]
        actor = Actor(trace, limiters)
        last: Decision | None = None
        for step in trace.steps:
            self.clock.set_us(step.move.target(self.clock.now_us(), trace.period_us, last))
            answer = actor.play(step)[0]
            last = answer if isinstance(answer, Decision) else last
            limiter, key, time = limiters[step.version], trace.key(step.who), self.clock.now_us()
            now = limiter.check(key, 0, tier=step.tier).remaining
            for back in (1, trace.period_us // 3, 2 * trace.period_us):
                self.clock.set_us(max(0, time - back))
                earlier = limiter.check(key, 0, tier=step.tier).remaining
                assert now is not None
                assert earlier is not None
                assert earlier <= now
            self.clock.set_us(time)

    @each_kind
    def test_units_counted_after_the_clock_was_set_back_use_the_latest_time(self, kind: str) -> None:
        ahead, behind = (self.limiter(self.rule(kind, 10)) for _ in range(2))
        for limiter in (ahead, behind):
            limiter.hit("a", 4)
        latest = self.clock.now_us()
        ahead.hit("a", 4)
        self.clock.advance_us(-50_000_000)
        behind.hit("a", 4)
        for now in (latest, latest + 12_345_678, latest + 70_000_000):
            self.clock.set_us(now)
            assert behind.check("a", 5) == ahead.check("a", 5)

    def test_counts_survive_a_restart_of_the_store(self) -> None:
        self.require("durable")
        rules = [self.rule(kind, 10, 3_600_000_000) for kind in self.kinds]
        limiters = [self.limiter(rule) for rule in rules]
        for limiter in limiters:
            limiter.hit("a", 4)
        before = [limiter.check("a", 0) for limiter in limiters]
        self.store.close()
        del self.store
        again = [self.limiter(rule, name=limiter.name) for rule, limiter in zip(rules, limiters, strict=True)]
        assert [limiter.check("a", 0) for limiter in again] == before


def _most_between(rule: Rule, start: int, end: int) -> int:
    """Return the maximum units that a rule may admit from one instant to another, both included."""
    limit, period = rule.quota.limit, rule.quota.period_us
    if rule.kind == "token_bucket":
        burst = limit if rule.quota.burst is None else rule.quota.burst
        tick = 1_000 if period > 3_600_000_000 else 1
        ticks = end // tick - start // tick
        return burst + limit * ticks * tick // period
    if rule.kind == "fixed_window":
        return limit * (end // period - start // period + 1)
    if rule.kind == "sliding_window" and not rule.strict:
        period -= -(period // -rule.buckets) - 1  # a unit may expire up to almost one bucket early
    return limit * ((end - start) // max(1, period) + 1)
