"""Penalties: which refusals count, and what a penalty refuses."""

from __future__ import annotations

from headgate import Limiter, Rule, concurrent, fixed_window, penalty, sliding_log
from headgate.stores.request import Request
from headgate.testing.contract.base import Contract, each_kind
from headgate.testing.contract.races import eager_switching, in_threads

SECOND_US = 1_000_000
MINUTE_US = 60 * SECOND_US
REFUSALS = 5


class PenaltyTests(Contract):
    """A limiter with a penalty."""

    @each_kind
    def test_a_penalty_begins_after_some_refusals_and_ends_after_its_duration(self, kind: str) -> None:
        limiter = self._strict(kind, penalty("10m", after=3))
        limiter.hit("a", 4)
        for _ in range(2):
            self.clock.advance_us(7)
            assert limiter.hit("a", 4).denied_by != "penalty"
        begun = limiter.hit("a", 4)
        assert (begun.denied_by, begun.limit, begun.retry_after_us) == ("penalty", 3, 10 * MINUTE_US)
        self.clock.advance_us(10 * MINUTE_US - 1)
        late = limiter.hit("a", 1)
        assert (late.denied_by, late.retry_after_us) == ("penalty", 1)
        self.clock.advance_us(1)
        assert limiter.hit("a", 4)

    def test_refusals_count_from_the_first_one_for_the_duration(self) -> None:
        limiter = self._strict("sliding_log", penalty("1m", after=2))
        limiter.record("a", 100)
        for _ in range(3):
            assert self._is_denied_by_rate(limiter)
            self.clock.advance_us(MINUTE_US)
            limiter.record("a", 100)
        limiter.hit("a")
        self.clock.advance_us(MINUTE_US - 1)
        assert limiter.hit("a").denied_by == "penalty"

    def test_an_admission_is_reported_by_the_other_rules(self) -> None:
        limiter = self._strict("sliding_log", penalty("1m", after=2))
        answer = limiter.hit("a")
        assert (answer.rule, answer.limit, answer.remaining) == ("rate", 4, 3)

    def test_only_hits_and_holds_count(self) -> None:
        limiter = self._strict("sliding_log", penalty("10m", after=1))
        limiter.record("a", 5)
        before = self.dump()
        for operation in ("hit", "hold"):
            attempt = Request(operation, "a", 1, now=self._now(), is_final=False)
            assert not limiter.gate.decide(attempt)[0]
        assert not limiter.check("a")
        limiter.record("a", 0)
        limiter.hit("a", 0)
        assert self.dump() == before
        assert limiter.check("a").denied_by == "rate"
        assert limiter.hold("a").decision.denied_by == "penalty"

    def test_refusals_by_a_penalty_write_nothing(self) -> None:
        limiter = self._strict("sliding_log", penalty("10m", after=1, growth=2, longest="1d"))
        limiter.hit("a", 4)
        first = limiter.hit("a")
        before = self.dump()
        assert [limiter.hit("a"), limiter.hold("a", 2).decision] == [first, first]
        assert self.dump() == before

    def test_refusals_by_places_and_by_limits_of_0_do_not_count(self) -> None:
        self.need("concurrent")
        limiter = self._limiter(
            concurrent(1, lease="1m"), fixed_window("9/m", tiers={"none": "0/m"}), penalty("10m", after=1)
        )
        held = limiter.hold("a")
        assert limiter.hold("a").decision.denied_by == "concurrent"
        assert limiter.hold("a", 0, tier="none")
        assert limiter.hold("a", tier="none").decision.denied_by == "per-minute"
        held.settle(1)
        assert limiter.hold("a")

    def test_refusals_count_for_the_scope_of_the_rule(self) -> None:
        limiter = self._limiter(
            fixed_window("1/m", scope="user"),
            fixed_window("2/m", scope="place"),
            penalty("10m", after=1, scope="user"),
            penalty("20m", after=1, scope="place"),
        )

        def denied_by(user: str, place: str) -> list[str]:
            return [
                result.name
                for result in limiter.hit({"user": user, "place": place}).results
                if not result.allowed
            ]

        assert denied_by("ann", "north") == []
        assert denied_by("ann", "south") == ["per-minute-user", "penalty-user"]
        assert denied_by("bob", "north") == []
        assert denied_by("ann", "north") == [
            "per-minute-user",
            "per-minute-place",
            "penalty-user",
            "penalty-place",
        ]
        assert denied_by("eve", "north") == ["per-minute-place", "penalty-place"]
        assert denied_by("eve", "south") == []

    def test_an_open_hold_settles_as_usual(self) -> None:
        limiter = self._strict("sliding_log", penalty("10m", after=1))
        released, settled, confirmed = (limiter.hold("a") for _ in range(3))
        limiter.record("a")
        assert limiter.hit("a").denied_by == "penalty"
        released.release()
        settled.settle(0)
        assert confirmed.confirm(1)
        assert [result.remaining for result in limiter.check("a", 0).results] == [2, 0]

    def test_a_reset_ends_a_penalty(self) -> None:
        limiter = self._strict("sliding_log", penalty("10m", after=1))
        limiter.hit("a", 4)
        assert not limiter.hit("a")
        limiter.reset("a")
        assert limiter.hit("a")

    def test_every_further_penalty_is_longer_until_the_longest(self) -> None:
        limiter = self._strict("fixed_window", penalty("1m", after=1, growth=3, longest="10m"))
        assert [self._penalty_of(limiter) for _ in range(4)] == [1, 3, 9, 10]
        self.clock.advance_us(10 * MINUTE_US - 1)  # one microsecond before the last one is forgotten
        assert self._penalty_of(limiter) == 10
        self.clock.advance_us(10 * MINUTE_US)
        assert limiter.check("a", 0).results[1].reset_after == 0
        assert self._penalty_of(limiter) == 1

    def test_a_clock_that_goes_back_ends_no_penalty(self) -> None:
        limiter = self._strict("sliding_log", penalty("10m", after=1))
        limiter.hit("a", 4)
        limiter.hit("a")
        self.clock.advance_us(-5 * MINUTE_US)
        assert limiter.hit("a").retry_after_us == 15 * MINUTE_US

    def test_a_penalty_refuses_whatever_the_unit(self) -> None:
        tokens = sliding_log("5/m", unit="tokens", name="rate")
        limiter = self._limiter(tokens, penalty("10m", after=1))
        limiter.hit("a", {"tokens": 5})
        assert limiter.hit("a", {"tokens": 1, "requests": 0}).denied_by == "penalty"
        self.clock.advance_us(5 * MINUTE_US)
        assert not limiter.check("a", {"tokens": 1, "requests": 0})
        assert limiter.check("a", {"tokens": 0, "requests": 7})

    def test_a_changed_number_of_refusals_keeps_the_count(self) -> None:
        patient = self._strict("sliding_log", penalty("10m", after=5))
        strict = self._limiter(*patient.rules[:1], penalty("10m", after=3), name=patient.name)
        patient.record("a", 9)
        assert patient.hit("a").denied_by == patient.hit("a").denied_by == "rate"
        assert strict.check("a").denied_by == "rate"
        assert strict.hit("a").denied_by == "penalty"
        assert patient.check("a").denied_by == "penalty"

    def _limiter(self, *rules: Rule, name: str | None = None) -> Limiter:
        self.need("penalty")
        self.require("all_or_nothing")
        return self.limiter(*rules, name=name)

    def _strict(self, kind: str, own: Rule) -> Limiter:
        return self._limiter(self.rule(kind, 4, name="rate"), own)

    def _penalty_of(self, limiter: Limiter) -> int:
        """Return the minutes of a new penalty, after waiting for its end."""
        self.clock.advance_us(0 if limiter.check("a") else limiter.check("a").retry_after_us or 0)
        limiter.record("a", 9)
        wait = limiter.hit("a").retry_after_us or 0
        self.clock.advance_us(wait)
        return wait // MINUTE_US

    def _is_denied_by_rate(self, limiter: Limiter) -> bool:
        return limiter.hit("a").denied_by == "rate"

    def _now(self) -> int | None:
        return None if self.own_time else self.clock.now_us()


class PenaltyRaceTests(Contract):
    """Penalties in several threads."""

    def test_threads_count_every_refusal_once(self) -> None:
        self.need("penalty")
        self.require("all_or_nothing")
        limiter = self.limiter(self.rule(self.kinds[0], 10, name="rate"), penalty("10m", after=REFUSALS))

        def hit(number: int) -> list[str | None]:
            return [limiter.hit("a").denied_by for _ in range(8)]

        with eager_switching():
            denied = [rule for answers in in_threads(6, hit) for rule in answers]
        assert (denied.count(None), denied.count("rate")) == (10, REFUSALS - 1)
