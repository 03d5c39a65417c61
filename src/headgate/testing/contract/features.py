"""Store features besides counting rates: units, moved holds, places, calendars, quotas of single calls."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import strategies as st

from headgate import ConfigError, CostTooHigh, Hold, Limiter, Quota, Rule, calendar, concurrent
from headgate.costs import total
from headgate.stores import base
from headgate.stores.request import Request
from headgate.testing.contract.base import Contract, each_kind
from headgate.testing.contract.races import RaceTally, eager_switching, in_threads
from headgate.testing.contract.traces import START_US

MINUTE_US = 60_000_000
PLACES = 5

_Act = tuple[str, int, int]
"""An operation, the time since the last one, and its cost."""

_ACTS = st.lists(
    st.tuples(
        st.sampled_from(("hold", "hold", "hit", "confirm", "confirm", "settle")),
        st.sampled_from((0, 1, 999_999, 7_654_321, 30_000_000, 60_000_000, 61_000_000)),
        st.integers(1, 6),
    ),
    max_size=14,
)


class UnitTests(Contract):
    """A cost for each rule."""

    @each_kind
    def test_each_rule_is_charged_the_cost_of_its_unit(self, kind: str) -> None:
        limiter = self._two_units(kind)
        limiter.hit("a", {"tokens": 30})
        assert self._left(limiter) == [9, 70]
        limiter.hit("a", {"tokens": 0, "requests": 2})
        assert self._left(limiter) == [7, 70]
        limiter.hit("a", 7)
        assert self._left(limiter) == [0, 63]

    @each_kind
    def test_a_refusal_by_one_unit_charges_no_other(self, kind: str) -> None:
        limiter = self._two_units(kind)
        limiter.hit("a", {"tokens": 80})
        before = self.dump()
        refused = limiter.hit("a", {"tokens": 30})
        assert (refused.allowed, refused.denied_by) == (False, "tokens")
        assert [result.allowed for result in refused.results] == [True, False]
        assert (self._left(limiter), self.dump()) == ([9, 20], before)

    @each_kind
    def test_an_uncharged_rule_returns_nothing(self, kind: str) -> None:
        limiter = self._two_units(kind)
        limiter.hit("a", {"tokens": 5})
        hold = limiter.hold("a", {"tokens": 20, "requests": 0})
        assert hold.receipts is not None
        assert [bool(receipt) for _, receipt in hold.receipts] == [False, True]
        hold.release()
        assert self._left(limiter) == [9, 95]

    @each_kind
    def test_a_hold_is_settled_by_unit(self, kind: str) -> None:
        limiter = self._two_units(kind)
        hold = limiter.hold("a", {"tokens": 60})
        assert hold.settle({"tokens": 25}) == {"requests": 1, "tokens": 25}
        assert self._left(limiter) == [9, 75]
        hold = limiter.hold("a", {"tokens": 10, "requests": 3})
        hold.settle({"tokens": 30, "requests": 1})
        assert self._left(limiter) == [8, 45]

    @each_kind
    def test_a_cost_above_the_capacity_names_the_unit(self, kind: str) -> None:
        limiter = self._two_units(kind)
        with pytest.raises(CostTooHigh, match="101 tokens") as raised:
            limiter.hit("a", {"tokens": 101})
        assert (raised.value.rule, raised.value.unit, raised.value.capacity) == ("tokens", "tokens", 100)

    @each_kind
    def test_units_are_recorded_by_unit(self, kind: str) -> None:
        limiter = self._two_units(kind)
        limiter.record("a", {"tokens": 130, "requests": 0})
        assert self._left(limiter) == [10, 0]

    def _two_units(self, kind: str) -> Limiter:
        self.need("units")
        self.require("all_or_nothing")
        tokens = self.rule(kind, 100, name="tokens", unit="tokens")
        return self.limiter(self.rule(kind, 10, name="requests"), tokens)

    def _left(self, limiter: Limiter) -> list[int]:
        return [result.remaining for result in limiter.check("a", 0).results]


class MoveTests(Contract):
    """Holds whose units are moved to the time of their confirmation."""

    def test_confirmed_units_count_from_the_time_of_confirmation(self) -> None:
        self.need("moves")
        limiter = self.limiter(self.rule("sliding_log", 5))
        hold = limiter.hold("a", 3)
        self.clock.advance_us(40_000_000)
        assert hold.confirm()
        assert hold.final == 3
        self.clock.advance_us(MINUTE_US - 1)
        assert limiter.check("a", 0).remaining == 2
        self.clock.advance_us(1)
        assert limiter.check("a", 0).remaining == 5

    @each_kind
    def test_an_immediate_confirmation_counts_like_a_hit_with_the_final_cost(self, kind: str) -> None:
        self.need("moves")
        moved, plain = (self.limiter(self.rule(kind, 10)) for _ in range(2))
        for limiter in (moved, plain):
            limiter.hit("a", 2)
        hold = moved.hold("a", 3)
        assert hold.confirm(5) == plain.hit("a", 5)
        for wait in (0, 1, 20_000_000, 40_000_001):
            self.clock.advance_us(wait)
            assert moved.check("a", 0) == plain.check("a", 0)

    @each_kind
    def test_a_refused_confirmation_changes_nothing(self, kind: str) -> None:
        self.need("moves")
        limiter = self.limiter(self.rule(kind, 5))
        hold = limiter.hold("a", 3)
        self.clock.advance_us(hold.decision.reset_after_us or 0)
        limiter.hit("a", 4)
        before, seen = self.dump(), limiter.check("a", 0)
        refused = hold.confirm()
        assert (refused.allowed, hold.final) == (False, None)
        assert (self.dump(), limiter.check("a", 0)) == (before, seen)
        hold.release()
        assert limiter.check("a", 0) == seen

    @each_kind
    def test_a_refused_confirmation_returns_nothing(self, kind: str) -> None:
        self.need("moves")
        limiter = self.limiter(self.rule(kind, 5))
        hold = limiter.hold("a", 2)
        limiter.hit("a", 3)
        before, seen = self.dump(), limiter.check("a", 0)
        refused = hold.confirm(3)
        assert (refused.allowed, refused.remaining) == (False, 0)
        assert (self.dump(), limiter.check("a", 0)) == (before, seen)
        assert hold.confirm(2)

    @each_kind
    def test_only_the_first_confirmation_counts(self, kind: str) -> None:
        self.need("moves")
        limiter = self.limiter(self.rule(kind, 10))
        hold = limiter.hold("a", 3)
        first = hold.confirm()
        assert [hold.confirm(), hold.confirm(7)] == [first, first]
        assert hold.release() == 3
        assert limiter.check("a", 0).remaining == 7

    @each_kind
    def test_a_confirmation_after_a_reset_takes_nothing_from_others(self, kind: str) -> None:
        self.need("moves")
        limiter = self.limiter(self.rule(kind, 10))
        hold = limiter.hold("a", 4)
        limiter.reset("a")
        limiter.hit("a", 5)
        assert hold.confirm()
        assert limiter.check("a", 0).remaining == 1

    @each_kind
    def test_several_rules_move_together_or_not_at_all(self, kind: str) -> None:
        self.need("moves")
        self.require("all_or_nothing")
        narrow = self.rule(self.kinds[0], 5, 10_000_000, name="narrow")
        limiter = self.limiter(self.rule(kind, 20, 3_600_000_000, name="wide"), narrow)
        hold = limiter.hold("a", 3)
        self.clock.advance_us(21_000_000)
        limiter.hit("a", 4)
        before = limiter.check("a", 0), self.dump()
        assert hold.confirm().denied_by == "narrow"
        assert (limiter.check("a", 0), self.dump()) == before

    def test_retry_after_of_confirmations_is_exact_and_the_limit_is_never_exceeded(self) -> None:
        """Check the limit over any span of the period, by the times of the holds and by the times of confirmation."""
        self.need("moves")
        rules = st.sampled_from([self.rule(kind, 8, buckets=7) for kind in self.kinds])
        self.for_all(st.tuples(rules, _ACTS), self._check_moves)

    def _check_moves(self, example: tuple[Rule, list[_Act]]) -> None:
        rule, acts = example
        self.clock.set_us(START_US)
        limiter = self.limiter(rule)
        taken: list[list[int]] = []  # for all units taken: time of the hold, time of the confirmation, number
        holds: list[tuple[Hold, list[int]]] = []
        for what, wait, cost in acts:
            self.clock.advance_us(wait)
            if what in ("hit", "hold"):
                hold = limiter.hold("a", cost)
                if hold:
                    taken.append([self.clock.now_us(), self.clock.now_us(), cost])
                    if what == "hold":
                        holds.append((hold, taken[-1]))
                    else:
                        hold.settle(cost)
            elif holds:
                hold, entry = holds.pop(cost % len(holds))
                if what == "settle":
                    entry[2] = hold.settle(min(cost, entry[2]))
                    continue
                answer = hold.confirm()
                if answer.retry_after_us is not None:
                    self.clock.advance_us(answer.retry_after_us - 1)
                    early = hold.confirm()
                    assert (early.allowed, early.retry_after_us) == (False, 1)
                    self.clock.advance_us(1)
                    answer = hold.confirm()
                assert answer.allowed
                entry[1] = self.clock.now_us()
        if rule.kind in ("sliding_window", "sliding_log"):
            for which in (0, 1):
                for start in (entry[which] for entry in taken):
                    span = range(start, start + rule.quota.period_us)
                    assert sum(entry[2] for entry in taken if entry[which] in span) <= rule.quota.limit


class PlaceTests(Contract):
    """Units that are held at once."""

    def test_open_holds_are_limited_and_a_release_frees_a_place(self) -> None:
        limiter = self._places(3)
        holds = [limiter.hold("a") for _ in range(4)]
        assert [hold.allowed for hold in holds] == [True, True, True, False]
        assert holds[3].decision.retry_after_us == MINUTE_US
        for end in (holds[0].release, lambda: holds[1].settle(1), lambda: holds[2].confirm()):
            assert not limiter.check("a")
            end()
            assert limiter.check("a", 0).remaining == 1
            limiter.hold("a")

    def test_a_place_is_free_when_its_lease_ends_and_not_a_microsecond_before(self) -> None:
        limiter = self._places(2)
        limiter.hold("a")
        self.clock.advance_us(10_000_000)
        limiter.hold("a")
        refused = limiter.hold("a", 2).decision
        assert (refused.retry_after_us, refused.reset_after_us) == (MINUTE_US, MINUTE_US)
        self.clock.advance_us(50_000_000 - 1)
        assert limiter.check("a").retry_after_us == 1
        self.clock.advance_us(1)
        assert limiter.hold("a")
        assert limiter.hold("b", 2)

    def test_a_renewed_hold_keeps_its_place(self) -> None:
        limiter = self._places(1)
        hold = limiter.hold("a")
        for _ in range(3):
            self.clock.advance_us(MINUTE_US - 1)
            assert hold.renew()
        assert not limiter.check("a")
        hold.release()
        assert limiter.check("a")
        assert not hold.renew()

    def test_an_expired_lease_is_not_renewed(self) -> None:
        limiter = self._places(1)
        first = limiter.hold("a")
        self.clock.advance_us(MINUTE_US)
        refused = first.renew()
        assert (refused.allowed, refused.retry_after, refused.remaining) == (False, None, 1)
        second = limiter.hold("a")
        before = self.dump()
        assert (first.renew().allowed, self.dump()) == (False, before)
        first.release()
        assert not limiter.check("a")
        second.release()
        assert not first.renew()
        assert limiter.check("a", 0).remaining == 1

    def test_a_renewal_after_the_release_takes_no_place(self) -> None:
        limiter = self._places(2)
        other, hold = limiter.hold("a"), limiter.hold("a")
        gate, late = limiter.gate, _renewal(hold)
        hold.release()
        assert not gate.decide(late)[0]
        assert limiter.check("a", 0).remaining == 1
        other.release()
        assert not gate.decide(late)[0]
        assert limiter.check("a", 0).remaining == 2

    def test_receipts_stay_valid_after_renewals(self) -> None:
        limiter = self._places(3)
        hold, other = limiter.hold("a", 2), limiter.hold("a")
        before = hold.receipts
        for _ in range(3):
            self.clock.advance_us(MINUTE_US - 1)
            assert hold.renew()
            assert hold.renew()  # renewing again changes nothing
        assert not other.renew()
        assert hold.receipts == before
        assert limiter.check("a", 0).remaining == 1
        assert hold.confirm()
        assert limiter.check("a", 0).remaining == 3

    def test_a_renewal_never_shortens_a_lease(self) -> None:
        limiter = self._places(1)
        shorter = self.limiter(concurrent(1, lease="10s", name="places"), name=limiter.name)
        hold = limiter.hold("a")
        self.clock.advance_us(MINUTE_US // 2)
        assert shorter.gate.decide(_renewal(hold))[0].reset_after_us == MINUTE_US // 2
        self.clock.advance_us(-MINUTE_US // 4)
        assert hold.renew().reset_after_us == MINUTE_US // 4 * 5  # relative to the latest time seen
        hold.release()

    def test_a_lowered_limit_lets_holders_renew(self) -> None:
        self.need("quotas")
        limiter = self._places(1)
        hold = limiter.hold("a", 5, tier="pro")
        lowered = self.limiter(concurrent(1, lease="60s", name="places"), name=limiter.name)
        assert lowered.gate.decide(_renewal(hold))[0].allowed
        assert not lowered.hold("a")
        hold.release()
        assert lowered.hold("a")

    def test_a_late_release_frees_no_place_of_others(self) -> None:
        limiter = self._places(1)
        late = limiter.hold("a")
        self.clock.advance_us(MINUTE_US)
        assert limiter.hold("a")
        late.release()
        assert not limiter.check("a")

    def test_hits_and_records_on_places_are_refused_and_take_no_place(self) -> None:
        limiter = self._places(2)
        for call in (limiter.hit, limiter.record):
            with pytest.raises(ConfigError, match="hold"):
                call("a")
        assert limiter.wait("a", timeout=0)
        assert limiter.check("a", 0).remaining == 2, "waiting for a place does not keep it"

    def test_places_and_rates_are_taken_together_or_not_at_all(self) -> None:
        self.require("all_or_nothing")
        rate = self.rule("fixed_window", 3, 3_600_000_000, name="rate")
        limiter = self._places(2, rate)
        first, second = limiter.hold("a"), limiter.hold("a")
        assert limiter.hold("a").decision.denied_by == "places"
        first.settle(1)
        second.release()
        assert [result.remaining for result in limiter.check("a", 0).results] == [2, 2]
        assert limiter.hold("a", 2)
        assert limiter.hold("b", 2)

    def test_renewing_charges_no_other_rule(self) -> None:
        self.require("all_or_nothing")
        limiter = self._places(2, self.rule("sliding_log", 10, name="rate"))
        hold = limiter.hold("a", 2)
        before = limiter.check("a", 0).results[1]
        assert hold.renew()
        assert limiter.check("a", 0).results[1] == before
        hold.release()
        assert [result.remaining for result in limiter.check("a", 0).results] == [2, 10]

    def test_tiers_and_quotas_share_the_places(self) -> None:
        self.need("quotas")
        limiter = self._places(2)
        limiter.hold("a", 2)
        assert not limiter.hold("a")
        assert limiter.hold("a", 3, tier="pro")
        assert limiter.hold("a", quota=6)
        assert not limiter.hold("a", tier="pro")

    def _places(self, limit: int, *others: Rule) -> Limiter:
        self.need("concurrent", "moves")
        places = concurrent(limit, lease="60s", name="places", tiers={"pro": 5})
        return self.limiter(places, *others)


def _renewal(hold: Hold) -> Request:
    """Return the request that renews the lease of a hold on one rule."""
    return Request("renew", hold.key, (total(hold.cost),), replaces=hold.receipts)


class CalendarTests(Contract):
    """Windows aligned to a calendar."""

    @pytest.mark.parametrize(
        ("span", "zone", "first", "next_first"),
        [
            ("day", "Europe/Berlin", (2024, 3, 31), (2024, 4, 1)),
            ("day", "Europe/Berlin", (2024, 10, 27), (2024, 10, 28)),
            ("day", "America/Havana", (2023, 3, 12), (2023, 3, 13)),
            ("week", "Asia/Tokyo", (2024, 12, 30), (2025, 1, 6)),
            ("month", "UTC", (2024, 2, 1), (2024, 3, 1)),
            ("month", "America/New_York", (2024, 11, 1), (2024, 12, 1)),
            ("year", "Europe/Berlin", (2024, 1, 1), (2025, 1, 1)),
        ],
    )
    def test_windows_begin_and_end_with_calendar_periods(
        self, span: str, zone: str, first: tuple[int, int, int], next_first: tuple[int, int, int]
    ) -> None:
        self.need("calendar")
        start, end = (_instant(day, zone) for day in (first, next_first))
        limiter = self.limiter(calendar(f"10/{span}", timezone=zone))
        self.clock.set_us(start - 1)
        limiter.hit("a", 4)
        assert limiter.hit("a", 7).retry_after_us == 1
        self.clock.set_us(start)
        assert limiter.hit("a", 10).reset_after_us == end - start
        self.clock.set_us(end - 1)
        refused = limiter.hit("a")
        assert (refused.retry_after_us, refused.reset_after_us) == (1, 1)
        self.clock.set_us(end)
        assert limiter.hit("a", 10)

    def test_a_clock_set_back_into_the_previous_period_admits_nothing_more(self) -> None:
        self.need("calendar")
        start = _instant((2024, 3, 1), "UTC")
        limiter = self.limiter(calendar("3/month"))
        self.clock.set_us(start)
        hold = limiter.hold("a", 3)
        self.clock.set_us(start - 1)
        refused = limiter.hit("a")
        assert refused.retry_after_us == 31 * 86_400_000_000 + 1
        hold.settle(1)
        assert limiter.hit("a", 2)
        self.clock.set_us(start + 31 * 86_400_000_000 - 1)
        assert not limiter.hit("a")

    def test_calendar_periods_and_time_zones_count_separately(self) -> None:
        self.need("calendar")
        rules = [calendar("9/day", name="x"), calendar("9/month", name="x")]
        rules.append(calendar("9/day", timezone="Asia/Tokyo", name="x"))
        limiters = [self.limiter(rules[0])]
        limiters += [self.limiter(rule, name=limiters[0].name) for rule in rules[1:]]
        for units, limiter in enumerate(limiters, start=1):
            limiter.record("a", units)
        assert [limiter.check("a", 0).remaining for limiter in limiters] == [8, 7, 6]


def _instant(day: tuple[int, int, int], zone: str) -> int:
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    return (datetime(*day, tzinfo=ZoneInfo(zone)) - epoch) // timedelta(microseconds=1)


class QuotaTests(Contract):
    """Quotas passed with a call."""

    @each_kind
    def test_a_quota_of_the_call_is_used_and_keeps_the_counts(self, kind: str) -> None:
        self.need("quotas")
        limiter = self.limiter(self.rule(kind, 4))
        limiter.hit("a", 3)
        assert limiter.hit("a", 5, quota="10/minute").remaining == 2
        assert not limiter.hit("a")
        assert limiter.check("a", 0, quota="100/minute").remaining == 92
        refused = limiter.hit("a", quota="8/minute")
        assert (refused.allowed, refused.limit) == (False, 8)
        limiter.hold("a", 2, quota="10/minute").release()
        assert limiter.check("a", 0, quota="10/minute").remaining == 2

    @each_kind
    def test_quotas_apply_to_the_named_rules(self, kind: str) -> None:
        self.need("quotas")
        self.require("all_or_nothing")
        tiers = {"pro": Quota(9, MINUTE_US)}
        limiter = self.limiter(self.rule(kind, 3, name="one", tiers=tiers), self.rule(kind, 5, name="two"))
        answer = limiter.check("a", 0, tier="pro", quota={"two": "7/minute"})
        assert [result.limit for result in answer.results] == [9, 7]
        assert limiter.hit("a", 7, tier="pro", quota={"two": "7/minute"})
        assert limiter.hit("a", 1).denied_by in ("one", "two")

    def test_any_number_of_quotas_can_be_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also with more quotas than are cached; the cache is small here."""
        self.need("quotas")
        monkeypatch.setattr(base, "QUOTAS_KEPT", 8)
        limiter = self.limiter(self.rule("fixed_window", 1))
        for limit in (*range(2, 30), 5):
            assert limiter.check("a", 0, quota=Quota(limit, MINUTE_US)).remaining == limit


class FeatureTests(UnitTests, MoveTests, PlaceTests, CalendarTests, QuotaTests):
    """The tests of all features."""


class FeatureRaceTests(Contract):
    """Threads that race for places and to confirm."""

    def test_threads_that_confirm_while_others_hit_never_exceed_the_limit(self) -> None:
        self.need("moves")
        self.require("exact")
        limiter = self.limiter(self.rule("sliding_log", 60))

        def race(number: int) -> int:
            chance, kept = random.Random(number), 0
            for _ in range(20):
                hold = limiter.hold("a", chance.randint(1, 3))
                if hold and hold.confirm(cost := chance.randint(0, 4)):
                    kept += cost
                else:
                    hold.release()
            return kept

        with eager_switching():
            kept = in_threads(6, race)
        assert sum(kept) <= 60
        assert limiter.check("a", 0).remaining == 60 - sum(kept)

    def test_threads_racing_for_places_never_exceed_the_limit(self) -> None:
        self.require("exact")
        self.need("concurrent", "moves")
        limiter, tally = self.limiter(concurrent(PLACES, lease="60s")), RaceTally()

        def race(number: int) -> int:
            won = 0
            for _ in range(30):
                hold = limiter.hold("a")
                if hold:
                    tally.add(1)
                    won += 1
                    hold.renew()
                    tally.add(-1)
                hold.release()
            return won

        with eager_switching():
            assert sum(in_threads(8, race)) > 0
        assert tally.most <= PLACES
        assert limiter.check("a", 0).remaining == PLACES
