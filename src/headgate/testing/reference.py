"""The simplest possible store: the pure algorithms over a dictionary.

It is the reference for every other store: with the same times, the same trace must give the same decisions. It never
expires states, has no locks and is slow, so it is not suitable for a service.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from headgate.algorithms import Algorithm, State, decide_all
from headgate.clock import Clock, SteadyClock, check_clock
from headgate.costs import Costs
from headgate.decision import Decision
from headgate.keys import Key, PlainKey, key_picker
from headgate.rules import Rule
from headgate.stores.base import RECORDED, Answer, Gate, Guarantees, Receipts, given_back, plain_tiers
from headgate.stores.request import Request

StateId = tuple[str, str, PlainKey]
"""Limiter, rule, key: the identity of a state."""


class ReferenceStore:
    """Counts in a dictionary, for one thread.

    Args:
        clock: The clock for calls without a time.

    Attributes:
        states: Every state except those deleted by reset or refund, with the first time at which it equals a fresh one.
    """

    guarantees = Guarantees(exact=False, may_lose="everything when the process ends; it is for one thread")

    remote = False
    has_rules = False

    def __init__(self, *, clock: Clock | None = None) -> None:
        self.clock: Clock = check_clock(clock) or SteadyClock()
        self.states: dict[StateId, tuple[State, int]] = {}
        self.births = count(1)

    def bind(self, limiter: str, rules: tuple[Rule, ...], *, deadline: float | None = None) -> Gate:
        return _ReferenceGate(self, limiter, rules)

    def close(self) -> None:
        """Delete everything."""
        self.states.clear()

    def load(self, place: StateId) -> State | None:
        """Return the state of a key."""
        found = self.states.get(place)
        return None if found is None else found[0]

    def save(self, place: StateId, state: State | None, algorithm: Algorithm) -> None:
        """Store the state of a key."""
        if state is None:
            self.states.pop(place, None)
        else:
            self.states[place] = state, algorithm.fresh_at(state)


class _ReferenceGate:
    """A limiter's rules over the states of a reference store."""

    def __init__(self, store: ReferenceStore, limiter: str, rules: tuple[Rule, ...]) -> None:
        self._store = store
        self._limiter = limiter
        self._identities = tuple(rule.identity for rule in rules)
        self._names = tuple(rule.name for rule in rules)
        self._tiers = plain_tiers(rules)
        self._keys = key_picker(rules)

    def decide(self, request: Request) -> Answer:
        algorithms = self._tiers.for_request(request)
        places = self._places(request.key)
        if request.operation == "record":
            self._record(request, algorithms, places)
            return RECORDED
        return self._decide(request, algorithms, places)

    def _decide(self, request: Request, algorithms: Sequence[Algorithm], places: Sequence[StateId]) -> Answer:
        costs = request.costs(len(algorithms))
        states = [self._store.load(place) for place in places]
        replaces = [receipt or None for _, receipt in request.replaces or ()] or None
        at, birth = self._now(request.now), next(self._store.births)
        after, verdicts = decide_all(
            algorithms, states, at, costs, birth, replaces, is_final=request.is_punishable
        )
        decision = Decision.make(self._names, verdicts)
        if request.operation == "peek":
            return decision, None
        receipts = []
        for place, before, state, algorithm, cost in zip(
            places, states, after, algorithms, costs, strict=True
        ):
            if state is not before:
                self._store.save(place, state, algorithm)
            if request.operation == "hold" and decision.allowed:
                receipts.append((place, algorithm.receipt(before, state, cost) if state and cost else ()))
        return decision, tuple(receipts) if any(receipt for _, receipt in receipts) else None

    def _record(self, request: Request, algorithms: Sequence[Algorithm], places: Sequence[StateId]) -> None:
        birth, at, costs = next(self._store.births), self._now(request.now), request.costs(len(algorithms))
        after = [
            algorithm.record(state, at, cost, birth) if cost else state
            for algorithm, state, cost in zip(algorithms, map(self._store.load, places), costs, strict=True)
        ]
        for place, state, algorithm in zip(places, after, algorithms, strict=True):
            self._store.save(place, state, algorithm)

    def refund(self, receipts: Receipts, cost: Costs, now: int | None) -> None:
        for algorithm, (place, receipt), units in given_back(self._tiers.own, receipts, cost):
            assert isinstance(place, tuple)
            after = algorithm.refund(self._store.load(place), receipt, units, self._now(now))
            self._store.save(place, after, algorithm)

    def reset(self, key: Key | None) -> None:
        for place in self._places(key):
            self._store.states.pop(place, None)

    def _places(self, key: Key | None) -> list[StateId]:
        keys = self._keys(key)
        return [(self._limiter, identity, k) for identity, k in zip(self._identities, keys, strict=True)]

    def _now(self, now: int | None) -> int:
        return self._store.clock.now_us() if now is None else now
