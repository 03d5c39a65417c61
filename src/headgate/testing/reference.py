"""The plainest store there could be: the pure functions over a dictionary.

It is the reference that every other store is held to: with the same times, the same trace must give the same decisions.
It forgets nothing, locks nothing and hurries nothing, so it is of no use in a service.
"""

from __future__ import annotations

from itertools import count

from headgate.algorithms import Algorithm, State, decide_all
from headgate.clock import Clock, SteadyClock
from headgate.decision import Decision
from headgate.keys import Key, PlainKey, key_picker
from headgate.rules import Rule
from headgate.stores.base import Gate, Guarantees, Receipts, Tiers, check_whole

StateId = tuple[str, str, PlainKey]
"""Limiter, rule, key: what a state is found by."""


class ReferenceStore:
    """Counts in a dictionary, for one thread.

    Args:
        clock: Where time comes from when a call does not say.

    Attributes:
        states: Every state that is not fresh by reset or refund, with the first time at which it equals a fresh one.
    """

    guarantees = Guarantees(exact=False, may_lose="everything when the process ends; it is for one thread")

    def __init__(self, *, clock: Clock | None = None) -> None:
        self.clock: Clock = SteadyClock() if clock is None else clock
        self.states: dict[StateId, tuple[State, int]] = {}
        self.births = count(1)

    def bind(self, limiter: str, rules: tuple[Rule, ...]) -> Gate:
        gate = _ReferenceGate(self, limiter, rules)
        return Gate(gate.hit, gate.peek, gate.hold, gate.record, gate.refund, gate.reset)

    def close(self) -> None:
        """Forget everything."""
        self.states.clear()

    def load(self, place: StateId) -> State | None:
        """Return the state of a key."""
        found = self.states.get(place)
        return None if found is None else found[0]

    def save(self, place: StateId, state: State | None, algorithm: Algorithm) -> None:
        """Keep the state of a key."""
        if state is None:
            self.states.pop(place, None)
        else:
            self.states[place] = state, algorithm.fresh_at(state)


class _ReferenceGate:
    """A limiter's rules over the states of a reference store."""

    def __init__(self, store: ReferenceStore, limiter: str, rules: tuple[Rule, ...]) -> None:
        self._store = store
        self._limiter = limiter
        self._rules = rules
        self._names = tuple(rule.name for rule in rules)
        self._tiers = Tiers(rules)
        self._keys = key_picker(rules)

    def hit(self, key: Key | None, cost: int, tier: str | None, now: int | None) -> Decision:
        return self.hold(key, cost, tier, now)[0]

    def peek(self, key: Key | None, cost: int, tier: str | None, now: int | None) -> Decision:
        states = [self._store.load(place) for place in self._places(key)]
        verdicts = decide_all(self._tiers.admitting(tier, cost), states, self._now(now), cost, 0)[1]
        return Decision.make(self._names, verdicts)

    def hold(
        self, key: Key | None, cost: int, tier: str | None, now: int | None
    ) -> tuple[Decision, Receipts | None]:
        algorithms = self._tiers.admitting(tier, cost)
        places = self._places(key)
        states = [self._store.load(place) for place in places]
        after, verdicts = decide_all(algorithms, states, self._now(now), cost, next(self._store.births))
        decision = Decision.make(self._names, verdicts)
        if not (cost and decision.allowed):
            return decision, None
        receipts = []
        for place, before, state, algorithm in zip(places, states, after, algorithms, strict=True):
            assert state is not None  # an admission of a cost leaves something counted
            self._store.save(place, state, algorithm)
            receipts.append((place, algorithm.receipt(before, state, cost)))
        return decision, tuple(receipts)

    def record(self, key: Key | None, cost: int, tier: str | None, now: int | None) -> None:
        check_whole(cost)
        places = self._places(key)
        if not cost:
            return
        algorithms = self._tiers.algorithms(tier)
        birth = next(self._store.births)
        after = [
            algorithm.record(self._store.load(place), self._now(now), cost, birth)
            for place, algorithm in zip(places, algorithms, strict=True)
        ]
        for place, state, algorithm in zip(places, after, algorithms, strict=True):
            self._store.save(place, state, algorithm)

    def refund(self, receipts: Receipts, cost: int, now: int | None) -> None:
        for algorithm, (place, receipt) in zip(self._tiers.algorithms(None), receipts, strict=True):
            assert isinstance(place, tuple)
            after = algorithm.refund(self._store.load(place), receipt, cost, self._now(now))
            self._store.save(place, after, algorithm)

    def reset(self, key: Key | None) -> None:
        for place in self._places(key):
            self._store.states.pop(place, None)

    def _places(self, key: Key | None) -> list[StateId]:
        return [
            (self._limiter, rule.identity, k) for rule, k in zip(self._rules, self._keys(key), strict=True)
        ]

    def _now(self, now: int | None) -> int:
        return self._store.clock.now_us() if now is None else now
