"""Decisions: the answers of limiters.

Every call creates a decision, so this file is also compiled, with the types in `decision.pxd`. Times are stored in whole
microseconds; seconds and results per rule are computed when they are read. Values that do not apply are `None`, never -1
or 0; the internal fields are plain numbers with `_NONE` for `None`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from headgate.clock import MICROSECONDS
from headgate.errors import RateLimited

_NONE: int = -(2**62)

Fields = tuple[bool, int, int, int | None, int | None]
"""The fields of a `Verdict` as a plain tuple."""


class Verdict(NamedTuple):
    """The answer of one rule; times in microseconds."""

    allowed: bool
    limit: int
    remaining: int
    retry_after_us: int | None
    reset_after_us: int | None


class RuleFigures:
    """The verdict of one rule as plain numbers; the memory store creates one for each of several rules."""

    __slots__ = ("allowed", "limit", "remaining", "reset_after_us", "retry_after_us")

    allowed: bool
    limit: int
    remaining: int
    retry_after_us: int
    reset_after_us: int

    def fields(self) -> Fields:
        """Return the fields of a `Verdict`."""
        retry_after_us = None if self.retry_after_us == _NONE else self.retry_after_us
        reset_after_us = None if self.reset_after_us == _NONE else self.reset_after_us
        return self.allowed, self.limit, self.remaining, retry_after_us, reset_after_us


class RuleResult(NamedTuple):
    """The answer of one rule with its name; times in seconds.

    Attributes:
        name: The rule's name.
        allowed: Whether this rule alone would have admitted.
        limit: The most it admits at once.
        remaining: Units left after this call.
        retry_after: Seconds until the same call would be admitted; `None` if it was, or if it never will be.
        reset_after: Seconds until the count is 0; `None` if the rule never counts anything.
    """

    name: str
    allowed: bool
    limit: int
    remaining: int
    retry_after: float | None
    reset_after: float | None


class Decision:
    """The answer for all rules of a limiter; true if admitted.

    The figures are those of the binding rule: for a refusal, the rule with the longest wait; for an admission, the rule
    with the fewest units remaining.
    """

    __slots__ = (
        "_allowed",
        "_degraded",
        "_figures",
        "_index",
        "_leased",
        "_limit",
        "_names",
        "_remaining",
        "_reset_after_us",
        "_retry_after_us",
    )

    _names: tuple[str, ...]
    _allowed: bool
    _limit: int
    _remaining: int
    _retry_after_us: int
    _reset_after_us: int
    _index: int  # of the binding rule
    _figures: tuple[RuleFigures, ...] | None  # of each rule, if there are several
    _degraded: bool
    _leased: bool

    @staticmethod
    def make(names: tuple[str, ...], verdicts: Sequence[Fields], *, degraded: bool = False) -> Decision:
        """Return the decision of several verdicts, in the order of the rules."""
        decision = decision_of(names, tuple(verdicts))
        return decision.as_degraded() if degraded else decision

    def as_degraded(self) -> Decision:
        """Return a copy that is marked as not decided by the limiter's store."""
        copy = _copy_of(self)
        copy._degraded = True
        return copy

    def as_leased(self) -> Decision:
        """Return a copy that is marked as decided from a chunk of leased units."""
        copy = _copy_of(self)
        copy._leased = True
        return copy

    def as_refused(self, retry_after_us: int = 0) -> Decision:
        """Return a refusal with the same figures, for units that are reserved for other callers."""
        if not self._allowed:
            return self
        copy = _copy_of(self)
        copy._allowed = False
        copy._retry_after_us = retry_after_us
        return copy

    @property
    def allowed(self) -> bool:
        """Whether the call was admitted."""
        return self._allowed

    @property
    def limit(self) -> int | None:
        """The most that the binding rule admits at once; `None` without rules."""
        return None if self._limit == _NONE else self._limit

    @property
    def remaining(self) -> int | None:
        """Units left after this call in the binding rule; `None` without rules."""
        return None if self._remaining == _NONE else self._remaining

    @property
    def retry_after_us(self) -> int | None:
        """Like `retry_after`, but in microseconds."""
        return None if self._retry_after_us == _NONE else self._retry_after_us

    @property
    def reset_after_us(self) -> int | None:
        """Like `reset_after`, but in microseconds."""
        return None if self._reset_after_us == _NONE else self._reset_after_us

    @property
    def retry_after(self) -> float | None:
        """Seconds until the same call would be admitted if there are no other calls.

        `None` for an admission, and for a refusal that is permanent (a limit of 0).
        """
        return _seconds(self.retry_after_us)

    @property
    def reset_after(self) -> float | None:
        """Seconds until the count of the binding rule is 0."""
        return _seconds(self.reset_after_us)

    @property
    def results(self) -> tuple[RuleResult, ...]:
        """The results of all rules, in order."""
        return tuple(
            RuleResult(
                name, v.allowed, v.limit, v.remaining, _seconds(v.retry_after_us), _seconds(v.reset_after_us)
            )
            for name, v in zip(self.names, self.verdicts, strict=True)
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all rules, in order."""
        return self._names

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The verdicts of all rules, in order; times in microseconds."""
        return tuple(map(Verdict._make, self.fields))

    @property
    def fields(self) -> tuple[Fields, ...]:
        """Like `verdicts`, but as plain tuples, which are faster to create."""
        if self._figures is not None:
            return tuple([each.fields() for each in self._figures])
        figures = self._allowed, self._limit, self._remaining, self.retry_after_us, self.reset_after_us
        return (figures,) if self._names else ()

    @property
    def rule(self) -> str | None:
        """Name of the binding rule; `None` without rules."""
        return self._names[self._index] if self._names else None

    @property
    def denied_by(self) -> str | None:
        """Name of the rule that refused; `None` for an admission."""
        return None if self._allowed else self.rule

    @property
    def degraded(self) -> bool:
        """Whether the store could not be reached and the failure policy decided."""
        return self._degraded

    @property
    def leased(self) -> bool:
        """Whether this process decided from a chunk of leased units; the figures are then those of the chunk's grant."""
        return self._leased

    def raise_if_denied(self) -> Decision:
        """Return this decision if it admits.

        Raises:
            RateLimited: It refuses.
        """
        if not self._allowed:
            raise RateLimited(self)
        return self

    def __bool__(self) -> bool:
        return self._allowed

    def __eq__(self, other: object) -> bool:
        return _fields_of(self) == _fields_of(other) if isinstance(other, Decision) else NotImplemented

    def __hash__(self) -> int:
        return hash(_fields_of(self))

    def __repr__(self) -> str:
        return (
            f"Decision(allowed={self.allowed}, limit={self.limit}, remaining={self.remaining}, "
            f"retry_after={self.retry_after}, reset_after={self.reset_after}, rule={self.rule!r}"
            f"{', degraded=True' if self.degraded else ''})"
        )

    def __str__(self) -> str:
        note = " (degraded: the store could not be reached)" if self.degraded else ""
        if self.limit is None:
            return f"{'allowed' if self.allowed else 'denied'}: no rule applies{note}"
        if self.allowed:
            return f"allowed by {self.rule}: {self.remaining} of {self.limit} left{note}"
        wait = "never admitted" if self.retry_after is None else f"retry in {_readable(self.retry_after)} s"
        return f"denied by {self.rule}: {self.remaining} of {self.limit} left, {wait}{note}"

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _restored, _fields_of(self)


def decision_of(names: tuple[str, ...], fields: tuple[Fields, ...]) -> Decision:
    """Return the decision of the verdicts of all rules, in order."""
    if not fields:
        return UNLIMITED
    if len(fields) > 1:
        return joint_decision(names, tuple([_figures_of(each) for each in fields]))
    allowed, limit, remaining, retry_after_us, reset_after_us = fields[0]
    return new_decision(
        names,
        allowed,
        limit,
        remaining,
        _NONE if retry_after_us is None else retry_after_us,
        _NONE if reset_after_us is None else reset_after_us,
    )


def joint_decision(names: tuple[str, ...], figures: tuple[RuleFigures, ...]) -> Decision:
    """Return the decision of the figures of several rules, in order."""
    index = _binding(figures)
    binding = figures[index]
    decision = new_decision(
        names,
        binding.allowed,
        binding.limit,
        binding.remaining,
        binding.retry_after_us,
        binding.reset_after_us,
    )
    decision._index = index
    decision._figures = figures
    return decision


def new_figures(
    allowed: bool, limit: int, remaining: int, retry_after_us: int, reset_after_us: int
) -> RuleFigures:
    """Return the figures of one rule from its internal fields."""
    figures = RuleFigures.__new__(RuleFigures)
    figures.allowed = allowed
    figures.limit = limit
    figures.remaining = remaining
    figures.retry_after_us = retry_after_us
    figures.reset_after_us = reset_after_us
    return figures


def _figures_of(fields: Fields) -> RuleFigures:
    allowed, limit, remaining, retry_after_us, reset_after_us = fields
    return new_figures(
        allowed,
        limit,
        remaining,
        _NONE if retry_after_us is None else retry_after_us,
        _NONE if reset_after_us is None else reset_after_us,
    )


def new_decision(
    names: tuple[str, ...],
    allowed: bool,
    limit: int,
    remaining: int,
    retry_after_us: int,
    reset_after_us: int,
) -> Decision:
    """Return the decision of a single rule from its internal fields."""
    decision = Decision.__new__(Decision)
    decision._names = names
    decision._allowed = allowed
    decision._limit = limit
    decision._remaining = remaining
    decision._retry_after_us = retry_after_us
    decision._reset_after_us = reset_after_us
    decision._index = 0
    decision._figures = None
    decision._degraded = False
    decision._leased = False
    return decision


def _copy_of(decision: Decision) -> Decision:
    return _restored(*_fields_of(decision))


def _fields_of(decision: Decision) -> tuple[Any, ...]:
    return (
        decision._names,
        decision._allowed,
        decision._limit,
        decision._remaining,
        decision._retry_after_us,
        decision._reset_after_us,
        decision._index,
        decision.fields,
        decision._degraded,
        decision._leased,
    )


def _restored(*fields: Any) -> Decision:
    """Return the decision with the fields of `_fields_of`."""
    decision = new_decision(*fields[:6])
    decision._index, verdicts, decision._degraded, decision._leased = fields[6:]
    decision._figures = tuple([_figures_of(each) for each in verdicts]) if len(verdicts) > 1 else None
    return decision


UNLIMITED = new_decision((), True, _NONE, _NONE, _NONE, _NONE)
"""The decision of a limiter without rules."""


def _readable(seconds: float) -> str:
    """Return seconds to the microsecond, without an exponent or trailing zeros."""
    return f"{seconds:.6f}".rstrip("0").rstrip(".")


def _seconds(microseconds: int | None) -> float | None:
    return None if microseconds is None else microseconds / MICROSECONDS


def _binding(figures: tuple[RuleFigures, ...]) -> int:
    """Return the index of the binding rule; the first one among equals."""
    binds, index, least, longest = 0, 0, -1, -1
    for each in figures:
        if not each.allowed:
            if each.retry_after_us == _NONE:
                return index  # a permanent refusal is the longest wait
            if each.retry_after_us > longest:
                binds, longest = index, each.retry_after_us
        elif longest < 0 and (least < 0 or each.remaining < least):
            binds, least = index, each.remaining
        index += 1  # noqa: SIM113  # with `enumerate` the index would be an object
    return binds
