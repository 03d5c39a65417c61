"""Counting by the days, weeks, months or years of a time zone.

State: birth, the instant at which its window ends, units in it. A state counts until that instant, so a clock that goes back
finds the window that was already counted in, and a store needs no calendar of its own: `edges_around` says where windows
begin and end, from which a store picks by its own clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from headgate.algorithms.base import Receipt, State, check_countable, moved
from headgate.calendars import window_end
from headgate.decision import Verdict
from headgate.quota import Span


@dataclass(frozen=True, slots=True)
class Calendar:
    """The calendar windows of one quota."""

    name: str
    limit: int
    span: Span
    timezone: str

    @property
    def capacity(self) -> int:
        return self.limit

    def decide(self, state: State | None, now: int, cost: int, birth: int) -> tuple[State | None, Verdict]:
        birth, end, count = self._current(state, now, birth)
        if cost and count + cost > self.limit:
            retry_after = end - now if self.limit else None
            return state, Verdict(
                False, self.limit, max(0, self.limit - count), retry_after, end - now if count else 0
            )
        count += cost
        verdict = Verdict(True, self.limit, max(0, self.limit - count), None, end - now if count else 0)
        return (birth, end, count) if cost else state, verdict

    def move(
        self, state: State | None, receipt: Receipt, now: int, cost: int, birth: int
    ) -> tuple[State | None, Verdict]:
        return moved(self, state, receipt, now, cost, birth)

    def record(self, state: State | None, now: int, cost: int, birth: int) -> State | None:
        birth, end, count = self._current(state, now, birth)
        check_countable(count, cost, self.name)
        return birth, end, count + cost

    def receipt(self, before: State | None, after: State, cost: int) -> Receipt:
        birth, end, _ = after
        return birth, end, cost

    def refund(self, state: State | None, receipt: Receipt, cost: int, now: int) -> State | None:
        birth, end, held = receipt
        if state is None or state[:2] != (birth, end):
            return state
        count = state[2] - min(cost, held)
        return (birth, end, count) if count > 0 else None

    def read(self, state: State, now: int) -> int:
        end = window_end(self.span, self.timezone, now)
        return now if end >= state[1] else state[1] - 1

    def fresh_at(self, state: State) -> int:
        return state[1]

    def _current(self, state: State | None, now: int, birth: int) -> State:
        """Return the state of the window that `now` falls into, or of a later one that was already counted in."""
        if state is None or state[1] <= now:
            return birth, window_end(self.span, self.timezone, now), 0
        return state
