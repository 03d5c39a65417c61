"""The interface of algorithms.

Rules of this package: no clock, no I/O, no locks, no logging. Every number is a whole number; time is an
argument, in microseconds. These functions are the reference: Lua and SQL are ports of them, step by step.

A *state* is a flat tuple of whole numbers, which every store can keep unchanged. Its first entry is its *birth*: a number
that is unique among all states of that key, past and present. A fresh state is `None`. A *receipt* is also such a tuple: the
birth of the charged state, the data to find the units again, and the cost as its last entry.

Time that goes backwards grants nothing: each algorithm replaces a time before its newest entry by the time of that entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from headgate.decision import Verdict
from headgate.errors import CostTooHigh
from headgate.quota import MAX_UNITS

State = tuple[int, ...]
"""The stored data of a rule and key."""
Receipt = tuple[int, ...]
"""The data to give back the units of a hold, for one rule."""

Receipts = tuple[tuple[object, Receipt], ...]
"""The receipts of a hold by rule: the name of the charged state in the store, and the algorithm's receipt.

The receipt of a rule that was not charged is empty.
"""

Operation = Literal["hit", "peek", "hold", "record", "renew"]
"""Take units; check only; take units that may be given back; count used units; extend leases."""


class Algorithm(Protocol):
    """A rule with one quota."""

    @property
    def name(self) -> str:
        """The rule's name."""

    @property
    def capacity(self) -> int:
        """The highest admitted cost; 0 refuses everything."""

    def decide(self, state: State | None, now: int, cost: int, birth: int) -> tuple[State | None, Verdict]:
        """Return the state after the call, and the verdict; a refusal or a cost of 0 returns the identical state.

        If the given state is fresh, `birth` becomes the birth of the new state.
        """

    def move(
        self, state: State | None, receipt: Receipt, now: int, cost: int, birth: int
    ) -> tuple[State | None, Verdict]:
        """Like `decide`, but give back the units of a receipt first.

        A refusal returns the identical state, and its verdict describes that state, except for `retry_after_us`. A
        `concurrent` rule renews the receipt's lease if the cost is not 0.
        """

    def record(self, state: State | None, now: int, cost: int, birth: int) -> State | None:
        """Return the state with the units counted, even beyond the limit."""

    def receipt(self, before: State | None, after: State, cost: int) -> Receipt:
        """Return the receipt of a charge, from the states before and after it."""

    def refund(self, state: State | None, receipt: Receipt, cost: int, now: int) -> State | None:
        """Return the state with up to `cost` of the receipt's units given back, as far as they still count."""

    def read(self, state: State, now: int) -> int:
        """Return the effective time: `now`, or the time of the newest entry if that is later."""

    def fresh_at(self, state: State) -> int:
        """Return the first time at which the state equals a fresh one."""


def moved(
    algorithm: Algorithm, state: State | None, receipt: Receipt, now: int, cost: int, birth: int
) -> tuple[State | None, Verdict]:
    """Give back a receipt's units and decide, for a rule whose units do not drain while they are held.

    The effective time comes from the state that contains the units: if the clock went back, they must not move to an
    earlier time.
    """
    at = now if state is None else algorithm.read(state, now)
    after, verdict = algorithm.decide(algorithm.refund(state, receipt, receipt[-1], at), at, cost, birth)
    if verdict.allowed:
        reset_after = verdict.reset_after_us
        return after, verdict._replace(reset_after_us=reset_after and reset_after + at - now)
    return refused_move(algorithm, state, now, verdict.retry_after_us and verdict.retry_after_us + at - now)


def refused_move(
    algorithm: Algorithm, state: State | None, now: int, retry_after_us: int | None
) -> tuple[State | None, Verdict]:
    """Return the refusal of a move: the unchanged state and a verdict about it."""
    as_is = algorithm.decide(state, now, 0, 0)[1]
    return state, as_is._replace(allowed=False, retry_after_us=retry_after_us)


@dataclass(frozen=True, slots=True)
class Limited:
    """Base of rules that count whole units up to a limit.

    Attributes:
        name: The rule's name.
        limit: The limit of units: in a period, in a window, or at once.
    """

    name: str
    limit: int

    @property
    def capacity(self) -> int:
        return self.limit

    def move(
        self: Algorithm, state: State | None, receipt: Receipt, now: int, cost: int, birth: int
    ) -> tuple[State | None, Verdict]:
        return moved(self, state, receipt, now, cost, birth)


def check_countable(count: int, cost: int, name: str) -> None:
    """Refuse a cost that would take the count above `MAX_UNITS`."""
    if count + cost > MAX_UNITS:
        raise CostTooHigh(cost, MAX_UNITS - count, name)
