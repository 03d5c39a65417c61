"""A penalty: after some refusals by the other rules of its scope, everything is refused for a while.

State: birth, start, refusals, end, duration. The refusals were counted since the start. End and duration are those of
the last penalty; both are 0 if there was none, or if it is forgotten.

A penalty is decided like a rule, but takes no units. If other rules refuse a call, `decide_all` counts the refusal in the
same step, and a penalty may begin. This is the one refusal that writes.

Counting begins with a refusal. It restarts after the duration of the first penalty, and so also after each penalty,
because none is shorter than the first. If the previous penalty ended less than the longest duration ago, a penalty is
`growth` times as long as the previous one, up to the longest.

If a clock goes back, refusals are counted at the start, and a penalty keeps its end.
"""

from __future__ import annotations

from dataclasses import dataclass

from headgate.algorithms.base import Algorithm, Receipt, State
from headgate.decision import Verdict
from headgate.quota import MAX_UNITS


@dataclass(frozen=True, slots=True)
class Penalty:
    """The penalty of a scope.

    Attributes:
        name: The rule's name.
        limit: The number of refusals after which a penalty begins.
        duration: Microseconds of the first penalty, and of counting.
        growth: The factor by which each further penalty is longer.
        longest: Microseconds of the longest penalty.
        watched: The indices of the rules whose refusals it counts.
    """

    name: str
    limit: int
    duration: int
    growth: int
    longest: int
    watched: tuple[int, ...] = ()

    @property
    def capacity(self) -> int:
        return MAX_UNITS

    def decide(self, state: State | None, now: int, cost: int, birth: int) -> tuple[State | None, Verdict]:
        """Return the identical state, and a refusal if a penalty has not ended yet.

        `remaining` is so large that a penalty that does not refuse is never the binding rule.
        """
        if state is None:
            return state, Verdict(True, self.limit, MAX_UNITS - cost, None, 0)
        _, start, refusals, end, _ = state
        reset_after = max(0, self.fresh_at(state) - now)
        if end > now:
            return state, Verdict(not cost, self.limit, 0, end - now if cost else None, reset_after)
        counted = refusals if start + self.duration > now else 0
        return state, Verdict(True, self.limit, max(0, MAX_UNITS - counted - cost), None, reset_after)

    def count(self, state: State | None, now: int, birth: int) -> State:
        """Return the state after a refusal by another rule, while no penalty is in force."""
        if state is None or self.fresh_at(state) <= now:
            state = (birth, now, 0, 0, 0)
        birth, start, refusals, end, duration = state
        if start + self.duration <= now:
            start, refusals = now, 0
        if end + self._remembered <= now:
            end, duration = 0, 0
        if refusals + 1 < self.limit:
            return birth, start, refusals + 1, end, duration
        at = max(now, start)
        duration = min(self.longest, duration * self.growth) if duration else self.duration
        return birth, at, 0, at + duration, duration

    def move(
        self, state: State | None, receipt: Receipt, now: int, cost: int, birth: int
    ) -> tuple[State | None, Verdict]:
        return self.decide(state, now, 0, birth)

    def record(self, state: State | None, now: int, cost: int, birth: int) -> State | None:
        return state

    def receipt(self, before: State | None, after: State, cost: int) -> Receipt:
        return ()

    def refund(self, state: State | None, receipt: Receipt, cost: int, now: int) -> State | None:
        return state

    def read(self, state: State, now: int) -> int:
        return max(now, state[1])

    def fresh_at(self, state: State) -> int:
        _, start, refusals, end, duration = state
        return max(start + self.duration if refusals else 0, end + self._remembered if duration else 0)

    @property
    def _remembered(self) -> int:
        """Microseconds after its end in which a penalty makes the next one longer."""
        return self.longest if self.growth > 1 else 0


def limit_of(algorithm: Algorithm) -> int:
    """Return the limit in verdicts: the capacity, or the refusals before a penalty."""
    return algorithm.limit if isinstance(algorithm, Penalty) else algorithm.capacity
