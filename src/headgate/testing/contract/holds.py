"""Hold, then settle: returned units leave no trace."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from headgate import Hold, Limiter, Rule
from headgate.rules import Kind
from headgate.testing.contract.base import Contract, each_kind
from headgate.testing.contract.traces import START_US

Event = tuple[str, int, int]
"""Another event, the time since the last one, and its cost.

Units are recorded instead of requested, and other holds are taken only if all worlds admit them, so that the same events
happen in every world.
"""

_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("record", "hold", "settle")),
        st.sampled_from((0, 1, 99_999, 1_000_000, 7_654_321, 30_000_000, 61_000_000)),
        st.integers(0, 6),
    ),
    max_size=8,
)


class World:
    """A limiter and the open holds of other callers."""

    def __init__(self, limiter: Limiter) -> None:
        self.limiter = limiter
        self._others: list[Hold] = []

    def happen(self, what: str, cost: int) -> None:
        """Play an event if there is room for it."""
        if what == "record":
            self.limiter.record("a", cost)
        elif what == "hold":
            self._others.append(self.limiter.hold("a", cost))
        elif self._others:
            self._others.pop(cost % len(self._others)).settle(cost)


class HoldTests(Contract):
    """A settled hold returns exactly its unused units and nothing that has expired."""

    @each_kind
    def test_an_immediate_release_leaves_no_counts(self, kind: str) -> None:
        held, without = (self.limiter(self.rule(kind, 10)) for _ in range(2))
        for limiter in (held, without):
            limiter.hit("a", 3)
        held.hold("a", 5).release()
        for wait in (0, 1, 12_345_678, 60_000_000):
            self.clock.advance_us(wait)
            assert held.check("a", 1) == without.check("a", 1)

    def test_releasing_a_hold_leaves_the_counts_without_it(self) -> None:
        """Compare with a second world in which only the settled units were ever counted."""
        kinds = [kind for kind in self.kinds if kind != "token_bucket"]
        if not kinds:
            pytest.skip("this store supports only token buckets")
        examples = st.tuples(st.sampled_from(kinds), _EVENTS, _EVENTS, st.integers(0, 9))
        self.for_all(examples, self._equals_world_without)

    def _equals_world_without(self, example: tuple[Kind, list[Event], list[Event], int]) -> None:
        kind, before, after, kept = example
        worlds = [World(self.limiter(self.rule(kind, 20))) for _ in range(2)]
        if self._settle_amid(worlds, before, after, (10, kept), kept):
            for wait in (0, 10_000_000, 50_000_000):
                self.clock.advance_us(wait)
                assert worlds[0].limiter.check("a", 0) == worlds[1].limiter.check("a", 0)

    def test_releasing_a_hold_of_a_bucket_never_returns_too_much(self) -> None:
        """The level is between the levels without and with the hold; without other events it is the former."""
        rules = st.just(self.rule("token_bucket", 60, burst=20))
        examples = st.tuples(rules, _EVENTS, _EVENTS, st.integers(0, 9))
        self.for_all(examples, self._lies_between_the_worlds)

    def _lies_between_the_worlds(self, example: tuple[Rule, list[Event], list[Event], int]) -> None:
        rule, before, after, kept = example
        worlds = [World(self.limiter(rule)) for _ in range(3)]
        if self._settle_amid(worlds, before, after, (10, kept, 10), kept):
            # The time until the bucket is full is more precise than the number of whole units left.
            resets = [world.limiter.check("a", 0).reset_after_us or 0 for world in worlds]
            settled, without, whole = resets
            assert without <= settled <= whole
            assert after or settled == without

    def _settle_amid(
        self, worlds: list[World], before: list[Event], after: list[Event], costs: tuple[int, ...], kept: int
    ) -> bool:
        """Hold units in each world amid other events, and settle them in the first; return false if they were refused."""
        self.clock.set_us(START_US)
        self._happen(worlds, before)
        if not worlds[0].limiter.check("a", max(costs)):
            return False
        holds = [world.limiter.hold("a", cost) for world, cost in zip(worlds, costs, strict=True)]
        self._happen(worlds, after)
        holds[0].settle(kept)
        return True

    def _happen(self, worlds: list[World], events: list[Event]) -> None:
        for what, wait, cost in events:
            self.clock.advance_us(wait)
            if what != "hold" or all(world.limiter.check("a", cost) for world in worlds):
                for world in worlds:
                    world.happen(what, cost)

    @each_kind
    def test_settling_at_less_returns_the_difference(self, kind: str) -> None:
        limiter = self.limiter(self.rule(kind, 10))
        hold = limiter.hold("a", 8)
        assert hold.settle(3) == 3
        assert limiter.check("a", 0).remaining == 7

    @each_kind
    def test_settling_at_more_records_the_difference(self, kind: str) -> None:
        limiter = self.limiter(self.rule(kind, 10))
        assert limiter.hold("a", 8).settle(25) == 25
        assert limiter.check("a", 0).remaining == 0
        assert not limiter.hit("a", 1)

    @each_kind
    def test_only_the_first_settling_counts(self, kind: str) -> None:
        limiter = self.limiter(self.rule(kind, 10))
        limiter.hit("a", 2)
        hold = limiter.hold("a", 5)
        assert [hold.settle(4), hold.release(), hold.settle(9), hold.settle(0)] == [4] * 4
        assert limiter.check("a", 0).remaining == 4

    @each_kind
    def test_a_refused_hold_returns_nothing(self, kind: str) -> None:
        limiter = self.limiter(self.rule(kind, 4))
        limiter.hit("a", 3)
        hold = limiter.hold("a", 2)
        assert not hold
        hold.release()
        assert limiter.check("a", 0).remaining == 1

    @each_kind
    @pytest.mark.parametrize("before", [0, 2], ids=["held first", "hit first"])
    def test_a_release_after_a_reset_returns_nothing(self, kind: str, before: int) -> None:
        limiter = self.limiter(self.rule(kind, 10))
        limiter.hit("a", before)
        hold = limiter.hold("a", 6)
        limiter.reset("a")
        assert limiter.check("a", 0).remaining == 10
        limiter.hit("a", 6)
        hold.release()
        assert limiter.check("a", 0).remaining == 4

    @each_kind
    def test_an_expired_hold_returns_nothing(self, kind: str) -> None:
        limiter = self.limiter(self.rule(kind, 10))
        limiter.hit("a", 2)
        hold = limiter.hold("a", 6)
        self.clock.advance_us(hold.decision.reset_after_us or 0)
        limiter.hit("a", 6)
        hold.release()
        assert limiter.check("a", 0).remaining == 4

    @each_kind
    def test_a_hold_of_another_store_returns_nothing(self, kind: str) -> None:
        """Also if both limiters use the same key: the units were counted elsewhere."""
        limiter = self.limiter(self.rule(kind, 10))
        elsewhere = self.open_store()
        try:
            other = self.limiter(self.rule(kind, 10), name=f"{limiter.name} elsewhere", store=elsewhere)
            hold = other.hold("a", 6)
            assert hold.receipts is not None
            limiter.hit("a", 1)
            limiter.hold("a", 6)
            foreign = tuple(
                (place, receipt)
                for (place, _), (_, receipt) in zip(
                    limiter.hold("a", 1).receipts or (), hold.receipts, strict=True
                )
            )
            limiter.gate.refund(foreign, 6, None)
            assert limiter.check("a", 0).remaining == 2
        finally:
            elsewhere.close()

    def test_overlapping_holds_of_a_bucket_do_not_return_drained_units(self) -> None:
        """Two holds of 10 at once, one of them released; ten ticks later 10 units are hit, and the other is released."""
        limiter = self.limiter(self.rule("token_bucket", 1, 1_000_000, burst=20))
        first, second = limiter.hold("a", 10), limiter.hold("a", 10)
        first.release()
        self.clock.advance_us(10_000_000)
        limiter.hit("a", 10)
        second.release()
        assert limiter.check("a", 0).remaining == 10

    @each_kind
    def test_holds_are_returned_in_all_rules(self, kind: str) -> None:
        self.need("several_rules")
        limiter = self.limiter(
            self.rule(kind, 10, name="one", scope="user"), self.rule(kind, 20, name="two", scope="*")
        )
        hold = limiter.hold({"user": "ann"}, 7)
        limiter.hit({"user": "bob"}, 2)
        hold.settle(1)
        assert [result.remaining for result in limiter.check({"user": "ann"}, 0).results] == [9, 17]

    @each_kind
    def test_a_hold_under_another_tier_is_returned(self, kind: str) -> None:
        limiter = self.limiter(self.rule(kind, 4, tiers={"pro": self.rule(kind, 10).quota}))
        limiter.hold("a", 9, tier="pro").release()
        assert limiter.check("a", 0).remaining == 4
