"""Consecutive windows: of a fixed length, or the days, weeks, months or years of a time zone.

State: birth, number of the window, units in it. The number of a fixed window is its index: window i covers
[i*period, (i+1)*period). The number of a calendar window is the instant of its end, so that stores need no calendar:
they receive the boundaries from `edges_around`, and select by their own clock.

A state counts until its window ends, so after a clock went back the later window is still counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from headgate.algorithms.base import Limited, Receipt, State, check_countable
from headgate.calendars import window_end
from headgate.decision import Verdict
from headgate.quota import Span


@dataclass(frozen=True, slots=True)
class Windows(Limited, ABC):
    """The windows of one quota."""

    @abstractmethod
    def number_at(self, now: int) -> int:
        """Return the number of the window that contains a time."""

    @abstractmethod
    def end_of(self, number: int) -> int:
        """Return the end of the window with this number."""

    def decide(self, state: State | None, now: int, cost: int, birth: int) -> tuple[State | None, Verdict]:
        birth, number, count = self._current(state, now, birth)
        reset_after = self.end_of(number) - now
        if cost and count + cost > self.limit:
            retry_after = reset_after if self.limit else None
            return state, Verdict(
                False, self.limit, max(0, self.limit - count), retry_after, reset_after if count else 0
            )
        count += cost
        verdict = Verdict(True, self.limit, max(0, self.limit - count), None, reset_after if count else 0)
        return (birth, number, count) if cost else state, verdict

    def record(self, state: State | None, now: int, cost: int, birth: int) -> State | None:
        birth, number, count = self._current(state, now, birth)
        check_countable(count, cost, self.name)
        return birth, number, count + cost

    def receipt(self, before: State | None, after: State, cost: int) -> Receipt:
        birth, number, _ = after
        return birth, number, cost

    def refund(self, state: State | None, receipt: Receipt, cost: int, now: int) -> State | None:
        birth, number, held = receipt
        if state is None or state[:2] != (birth, number):
            return state
        count = state[2] - min(cost, held)
        return (birth, number, count) if count > 0 else None

    def read(self, state: State, now: int) -> int:
        return now if self.number_at(now) >= state[1] else self.fresh_at(state) - 1

    def fresh_at(self, state: State) -> int:
        return self.end_of(state[1])

    def _current(self, state: State | None, now: int, birth: int) -> State:
        """Return the state of the window that contains `now`, or of a later window if that has counts already."""
        if state is None or self.fresh_at(state) <= now:
            return birth, self.number_at(now), 0
        return state


@dataclass(frozen=True, slots=True)
class FixedWindow(Windows):
    """Windows of a fixed length, aligned to the epoch."""

    period: int

    def number_at(self, now: int) -> int:
        return now // self.period

    def end_of(self, number: int) -> int:
        return (number + 1) * self.period


@dataclass(frozen=True, slots=True)
class Calendar(Windows):
    """Days, weeks, months or years of a time zone."""

    span: Span
    timezone: str

    def number_at(self, now: int) -> int:
        return window_end(self.span, self.timezone, now)

    def end_of(self, number: int) -> int:
        return number
