"""The answer and the effects of a single call."""

from __future__ import annotations

from typing import Any

import pytest

from headgate import ConfigError, CostTooHigh, Limiter
from headgate.decision import UNLIMITED
from headgate.keys import Key
from headgate.testing.contract.base import Contract, each_kind

MINUTE_US = 60_000_000


class DecisionTests(Contract):
    """Limits, costs and refusals."""

    @each_kind
    def test_a_burst_of_exactly_the_limit_is_admitted(self, kind: str) -> None:
        limiter = self.limiter(self.rule(kind, 5))
        answers = [limiter.hit("a") for _ in range(7)]
        assert [answer.allowed for answer in answers] == [True] * 5 + [False] * 2
        assert [answer.remaining for answer in answers] == [4, 3, 2, 1, 0, 0, 0]
        assert {answer.limit for answer in answers} == {5}

    @each_kind
    def test_a_cost_is_charged_in_full_or_not_at_all(self, kind: str) -> None:
        limiter = self.limiter(self.rule(kind, 10))
        assert limiter.hit("a", 7).remaining == 3
        assert not limiter.hit("a", 4)
        assert limiter.check("a", 0).remaining == 3
        assert limiter.hit("a", 3).remaining == 0

    @each_kind
    def test_a_refusal_consumes_nothing(self, kind: str) -> None:
        """Neither now nor at any of the times in the refusal."""
        refused, twin = (self.limiter(self.rule(kind, 3)) for _ in range(2))
        for limiter in (refused, twin):
            limiter.hit("a", 2)
        self.clock.advance_us(1_234_567)
        first = refused.hit("a", 2)
        assert not first
        assert [refused.hit("a", 2) for _ in range(5)] == [first] * 5
        for wait in (0, first.retry_after_us or 0, first.reset_after_us or 0):
            self.clock.set_us(self.clock.now_us() + wait)
            assert refused.check("a", 0) == twin.check("a", 0)

    @each_kind
    def test_calls_that_charge_nothing_write_nothing(self, kind: str) -> None:
        limiter = self.limiter(self.rule(kind, 3, tiers={"none": self.rule(kind, 0).quota}))
        limiter.hit("a", 2)
        before = self.dump()
        self.clock.advance_us(1_000)
        limiter.hit("a", 2)
        limiter.hit("a", 1, tier="none")
        limiter.hold("a", 2)
        limiter.check("a", 1)
        limiter.check("somebody else", 1)
        limiter.hit("a", 0)
        limiter.hit("somebody else", 0)
        limiter.record("a", 0)
        with pytest.raises(CostTooHigh):
            limiter.hit("a", 4)
        assert self.dump() == before

    @each_kind
    def test_a_cost_of_0_is_admitted_even_above_the_limit(self, kind: str) -> None:
        limiter = self.limiter(self.rule(kind, 2))
        limiter.record("a", 5)
        before = limiter.check("a", 1)
        answer = limiter.hit("a", 0)
        assert answer.allowed
        assert answer.remaining == 0
        assert answer.retry_after is None
        assert limiter.check("a", 1) == before

    @each_kind
    def test_a_limit_of_0_refuses_every_call(self, kind: str) -> None:
        limiter = self.limiter(self.rule(kind, 0))
        for cost in (1, 1_000_000):
            answer = limiter.hit("a", cost)
            assert not answer.allowed
            assert answer.retry_after is None
            assert (answer.limit, answer.remaining) == (0, 0)
        assert limiter.hit("a", 0).allowed

    @each_kind
    def test_a_cost_above_the_capacity_raises(self, kind: str) -> None:
        self.need("several_rules")
        limiter = self.limiter(self.rule(kind, 5), self.rule("fixed_window", 100, name="wider"))
        for call in (limiter.hit, limiter.check, limiter.hold):
            with pytest.raises(CostTooHigh) as raised:
                call("a", 6)
            assert (raised.value.cost, raised.value.capacity) == (6, 5)
        assert limiter.check("a", 5)

    @each_kind
    def test_a_cost_that_is_not_a_whole_number_raises(self, kind: str) -> None:
        limiter = self.limiter(self.rule(kind, 5))
        bad_costs: list[Any] = [-1, 1.0, True, None, "1", 2**53, 10**30]
        for cost in bad_costs:
            for call in (limiter.hit, limiter.check, limiter.hold, limiter.record):
                with pytest.raises(ConfigError):
                    call("a", cost)
        assert limiter.check("a", 0).remaining == 5

    @each_kind
    def test_check_answers_like_hit_and_charges_nothing(self, kind: str) -> None:
        limiter = self.limiter(self.rule(kind, 4))
        for cost in (3, 1, 1, 2, 0):
            looked = [limiter.check("a", cost) for _ in range(3)]
            assert looked == [limiter.hit("a", cost)] * 3
            self.clock.advance_us(7)

    @each_kind
    def test_recording_counts_beyond_the_limit(self, kind: str) -> None:
        limiter = self.limiter(self.rule(kind, 4))
        assert limiter.record("a", 3) == UNLIMITED
        assert limiter.check("a", 0).remaining == 1
        assert limiter.record("a", 6) == UNLIMITED
        assert limiter.check("a", 0).remaining == 0
        refused = limiter.hit("a", 1)
        assert not refused
        self._check_retry_after(limiter, "a", 1)

    @each_kind
    def test_a_changed_limit_keeps_the_counts(self, kind: str) -> None:
        wide = self.limiter(self.rule(kind, 10))
        narrow = self.limiter(self.rule(kind, 4), name=wide.name)
        wide.hit("a", 3)
        assert narrow.check("a", 0).remaining == 1
        narrow.hit("a", 1)
        assert wide.check("a", 0).remaining == 6

    @each_kind
    def test_tiers_count_together(self, kind: str) -> None:
        limiter = self.limiter(self.rule(kind, 4, tiers={"pro": self.rule(kind, 10).quota}))
        limiter.hit("a", 3)
        assert limiter.check("a", 0, tier="pro").remaining == 7
        limiter.hit("a", 1, tier="pro")
        assert limiter.check("a", 0, tier="unheard of").remaining == 0

    @each_kind
    def test_several_rules_are_charged_together_or_not_at_all(self, kind: str) -> None:
        self.require("all_or_nothing")
        limiter = self.limiter(
            self.rule(kind, 10, name="wide"),
            self.rule(kind, 3, name="narrow"),
            self.rule(kind, 10, name="last"),
        )
        limiter.hit("a", 2)
        before, dumped = limiter.check("a", 0), self.dump()
        answer = limiter.hit("a", 2)
        assert answer.denied_by == "narrow"
        assert [result.remaining for result in answer.results] == [8, 1, 8]
        assert [result.allowed for result in answer.results] == [True, False, True]
        assert (limiter.check("a", 0), self.dump()) == (before, dumped)
        assert [result.remaining for result in limiter.hit("a", 1).results] == [7, 0, 7]

    @each_kind
    def test_rules_with_separate_keys_are_charged_together_or_not_at_all(self, kind: str) -> None:
        self.require("all_or_nothing")
        limiter = self.limiter(
            self.rule(kind, 3, scope="user"), self.rule(kind, 4, scope="realm"), self.rule(kind, 9, scope="*")
        )

        def remaining(user: str, realm: str, cost: int = 0) -> list[int]:
            answer = (limiter.hit if cost else limiter.check)({"user": user, "realm": realm}, cost)
            return [result.remaining for result in answer.results]

        assert remaining("ann", "north", 2) == [1, 2, 7]
        assert remaining("bob", "north", 3) == [3, 2, 7]  # refused: the realm has too few units left
        assert remaining("bob", "north", 1) == [2, 1, 6]
        assert remaining("ann", "south") == [1, 4, 6]
        limiter.reset({"user": "ann", "realm": "south"})
        assert remaining("ann", "north") == [3, 1, 9]

    @each_kind
    def test_the_most_restrictive_rule_is_reported(self, kind: str) -> None:
        self.require("all_or_nothing")
        limiter = self.limiter(
            self.rule(kind, 4, MINUTE_US, name="minute"), self.rule(kind, 5, 60 * MINUTE_US, name="hour")
        )
        assert limiter.hit("a", 4).rule == "minute"
        assert limiter.hit("a", 2).denied_by == "hour"
        self.clock.advance_us(3 * MINUTE_US)
        assert limiter.hit("a", 1).rule == "hour"

    def _check_retry_after(self, limiter: Limiter, key: Key, cost: int) -> None:
        """Check that a refused call is admitted from exactly the time in the refusal on."""
        refused = limiter.check(key, cost)
        assert not refused
        assert refused.retry_after_us is not None
        self.clock.advance_us(refused.retry_after_us - 1)
        early = limiter.hit(key, cost)
        assert (early.allowed, early.retry_after_us) == (False, 1)
        self.clock.advance_us(1)
        assert limiter.hit(key, cost).allowed
