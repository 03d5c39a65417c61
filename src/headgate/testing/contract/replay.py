"""Replay: a trace gives the same decisions as the pure functions, and as the vectors."""

from __future__ import annotations

import pytest

from headgate import Decision, Hold, Limiter
from headgate.algorithms import MAX_ENTRIES
from headgate.rules import RATES
from headgate.testing.contract.base import Contract
from headgate.testing.contract.traces import START_US, Actor, Trace, traces
from headgate.testing.reference import ReferenceStore
from headgate.testing.scenarios import Scenario, ScenarioPlayer, load_vectors

MINUTE_US = 60_000_000
VECTORS = load_vectors()


class ReplayTests(Contract):
    """The store against the reference, call by call."""

    @pytest.mark.parametrize("file", VECTORS)
    def test_vectors_are_answered_to_the_microsecond(self, file: str) -> None:
        for scenario in VECTORS[file]:
            if missing := scenario.features & self.missing_features:
                pytest.skip(f"not supported by this store yet: {', '.join(sorted(missing))}")
            if not set(scenario.kinds) & set(RATES) <= set(self.kinds):
                pytest.skip(f"this store does not support all of {', '.join(scenario.kinds)}")
            if len(scenario.versions[0]) > 1:
                self.require("all_or_nothing")
            self._answers(scenario)

    def _answers(self, scenario: Scenario) -> None:
        name = self.limiter(*scenario.versions[0]).name
        player = ScenarioPlayer(self.clock, [self.limiter(*rules, name=name) for rules in scenario.versions])
        for number, step in enumerate(scenario.steps):
            answer = player.play(step)
            assert answer == step.expected, f"{scenario}, step {number}: {step}"

    def test_random_traces_are_answered_like_the_pure_functions(self) -> None:
        most_rules = 3 if self.store.guarantees.all_or_nothing else 1
        self.for_all(traces(self.kinds, most_rules=most_rules), self._replay)

    def test_random_traces_of_everything_are_answered_like_the_pure_functions(self) -> None:
        """Traces contain units, moved holds, places, calendars and quotas of single calls, if the store supports them."""
        most_rules = 3 if self.store.guarantees.all_or_nothing else 1
        self.for_all(traces(self.kinds, most_rules=most_rules, features=self.features), self._replay)

    def test_random_traces_with_a_penalty_are_answered_like_the_pure_functions(self) -> None:
        self.need("penalty")
        self.require("all_or_nothing")
        self.for_all(traces(self.kinds, most_rules=2, features=frozenset(("penalty",))), self._replay)

    def test_random_traces_of_one_rule_are_answered_like_the_pure_functions(self) -> None:
        """One rule without a scope takes the shortest path through a store, and so gets a separate search."""
        self.for_all(traces(self.kinds, most_rules=1), self._replay)

    def test_a_full_log_is_answered_like_the_pure_functions(self) -> None:
        """Recorded units beyond 1,000 entries are added to the newest one."""
        rules = [self.rule("sliding_log", limit) for limit in (MAX_ENTRIES, 3)]
        name = self.limiter(*rules[:1]).name
        reference = ReferenceStore(clock=self.clock)
        stores = [
            [Limiter(rule, name=name, store=reference) for rule in rules],
            [self.limiter(rule, name=name) for rule in rules],
        ]
        holds: list[Hold] = []
        for number in range(MAX_ENTRIES + 3):
            self.clock.advance_us(7)
            if number in (0, 1, 200, 201, 499):
                holds += [wide.hold("a") for wide, _ in stores]
            for wide, narrow in stores:
                (wide if number % 3 == 1 else narrow).record("a", 1 + number % 2)
        assert stores[0][0].check("a").reset_after_us == stores[1][0].check("a").reset_after_us == MINUTE_US
        self._look_alike(stores)
        for place in (4, 0, 2, 1):
            for hold in holds[2 * place : 2 * place + 2]:
                assert hold.decision.allowed
                hold.release()
            self._look_alike(stores)
        newest = self.clock.now_us()
        for now in (newest - 50, START_US + MINUTE_US + 7, newest + MINUTE_US - 1):
            self.clock.set_us(now)
            self._look_alike(stores)
            for wide, _ in stores:
                wide.record("a", 5)
            self._look_alike(stores)

    def _look_alike(self, stores: list[list[Limiter]]) -> None:
        """Check that two stores give the same answers for any limit and cost."""
        expected, actual = (
            [limiter.check("a", cost) for limiter in limiters for cost in (0, 1, 3)] for limiters in stores
        )
        assert actual == expected

    def _replay(self, trace: Trace) -> None:
        self.clock.set_us(START_US)
        name = self.limiter(*trace.versions[0]).name
        reference = ReferenceStore(clock=self.clock)
        expected = Actor(trace, [Limiter(*rules, name=name, store=reference) for rules in trace.versions])
        actual = Actor(trace, [self.limiter(*rules, name=name) for rules in trace.versions])
        last: Decision | None = None
        latest = START_US
        for number, step in enumerate(trace.steps):
            now = step.move.target(self.clock.now_us(), trace.period_us, last)
            self.clock.set_us(max(now, self._earliest(reference, latest)))
            latest = max(latest, self.clock.now_us())
            answer = expected.play(step)
            assert (number, actual.play(step)) == (number, answer)
            last = answer[0] if isinstance(answer[0], Decision) else last

    def _earliest(self, reference: ReferenceStore, latest: int) -> int:
        """Return how far back the clock may go.

        A store with its own clock may have deleted states that were fresh at the latest time it saw. If the clock goes
        back further than that, it cannot answer like a store that never deletes. It admits no more than it should: the
        answer is that of the latest time.
        """
        if not self.own_time:
            return 0
        return max((fresh_at for _, fresh_at in reference.states.values() if fresh_at <= latest), default=0)
