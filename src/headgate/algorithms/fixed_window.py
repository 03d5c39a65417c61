"""Counting in windows aligned to the epoch.

State: birth, index of the window, units in it. Window i covers [i*period, (i+1)*period).
"""

from __future__ import annotations

from dataclasses import dataclass

from headgate.algorithms.base import Receipt, State, check_countable, moved
from headgate.decision import Verdict


@dataclass(frozen=True, slots=True)
class FixedWindow:
    """The fixed window of one quota."""

    name: str
    limit: int
    period: int

    @property
    def capacity(self) -> int:
        return self.limit

    def decide(self, state: State | None, now: int, cost: int, birth: int) -> tuple[State | None, Verdict]:
        birth, index, count = self._current(state, now, birth)
        reset_after = (index + 1) * self.period - now
        if cost and count + cost > self.limit:
            retry_after = reset_after if self.limit else None
            return state, Verdict(
                False, self.limit, max(0, self.limit - count), retry_after, reset_after if count else 0
            )
        count += cost
        verdict = Verdict(True, self.limit, max(0, self.limit - count), None, reset_after if count else 0)
        return (birth, index, count) if cost else state, verdict

    def move(
        self, state: State | None, receipt: Receipt, now: int, cost: int, birth: int
    ) -> tuple[State | None, Verdict]:
        return moved(self, state, receipt, now, cost, birth)

    def record(self, state: State | None, now: int, cost: int, birth: int) -> State | None:
        birth, index, count = self._current(state, now, birth)
        check_countable(count, cost, self.name)
        return birth, index, count + cost

    def receipt(self, before: State | None, after: State, cost: int) -> Receipt:
        birth, index, _ = after
        return birth, index, cost

    def refund(self, state: State | None, receipt: Receipt, cost: int, now: int) -> State | None:
        birth, index, held = receipt
        if state is None or state[:2] != (birth, index):
            return state
        count = state[2] - min(cost, held)
        return (birth, index, count) if count > 0 else None

    def read(self, state: State, now: int) -> int:
        return max(now, state[1] * self.period)

    def fresh_at(self, state: State) -> int:
        return (state[1] + 1) * self.period

    def _current(self, state: State | None, now: int, birth: int) -> State:
        """Return the state of the window that `now` falls into, or of a later one that was already counted in."""
        index = now // self.period
        if state is None or state[1] < index:
            return birth, index, 0
        return state
