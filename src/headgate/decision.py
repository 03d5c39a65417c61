"""The answer to "may I?".

A decision is made on every call, so it is a plain tuple underneath, times stay whole microseconds, and what few callers
read (seconds, one result per rule) is worked out when it is read. `None` stands where nothing applies, never -1 or 0.

Layout of the tuple, which stores build directly (`make` is for everybody else):

    0 allowed   1 limit   2 remaining   3 retry_after_us   4 reset_after_us      of the rule that binds
    5 names of all rules   6 index of the binding rule   7 verdicts of all rules, or None if there is just one
    8 degraded
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from headgate.clock import MICROSECONDS
from headgate.errors import RateLimited


class Verdict(NamedTuple):
    """What one rule says; times in microseconds."""

    allowed: bool
    limit: int
    remaining: int
    retry_after_us: int | None
    reset_after_us: int | None


class RuleResult(NamedTuple):
    """What one rule said, by name; times in seconds.

    Attributes:
        name: The rule's name.
        allowed: Whether this rule alone would have admitted.
        limit: The most it admits at once.
        remaining: Units left after this call.
        retry_after: Seconds until the same call would be admitted; `None` if it was, or if it never will be.
        reset_after: Seconds until nothing is counted any more; `None` if nothing ever is.
    """

    name: str
    allowed: bool
    limit: int
    remaining: int
    retry_after: float | None
    reset_after: float | None


class Decision(tuple[object, ...]):
    """The answer for all rules of a limiter; true if admitted.

    The figures are those of the rule that binds: of a refusal, the rule that keeps the caller waiting longest; of an
    admission, the one with the least remaining.
    """

    __slots__ = ()

    @classmethod
    def make(cls, names: tuple[str, ...], verdicts: Sequence[Verdict], *, degraded: bool = False) -> Decision:
        """Return the decision of several verdicts, all of which must allow."""
        if len(verdicts) == 1:
            return tuple.__new__(cls, (*verdicts[0], names, 0, None, degraded))
        if not verdicts:
            return UNLIMITED.as_degraded() if degraded else UNLIMITED
        index = _binding(verdicts)
        return tuple.__new__(cls, (*verdicts[index], names, index, tuple(verdicts), degraded))

    def as_degraded(self) -> Decision:
        """Return the same answer, marked as not coming from the limiter's own store."""
        return tuple.__new__(Decision, (*self[:8], True))

    def as_refused(self, retry_after_us: int = 0) -> Decision:
        """Return a refusal with the same figures: there may be room, but it is promised to others."""
        if not self.allowed:
            return self
        return tuple.__new__(Decision, (False, *self[1:3], retry_after_us, *self[4:]))

    @property
    def allowed(self) -> bool:
        """Whether the call was admitted."""
        return self[0]  # type: ignore[return-value]  # by layout

    @property
    def limit(self) -> int | None:
        """The most that the binding rule admits at once; `None` without rules."""
        return self[1]  # type: ignore[return-value]  # by layout

    @property
    def remaining(self) -> int | None:
        """Units left after this call in the binding rule; `None` without rules."""
        return self[2]  # type: ignore[return-value]  # by layout

    @property
    def retry_after_us(self) -> int | None:
        """As `retry_after`, in microseconds."""
        return self[3]  # type: ignore[return-value]  # by layout

    @property
    def reset_after_us(self) -> int | None:
        """As `reset_after`, in microseconds."""
        return self[4]  # type: ignore[return-value]  # by layout

    @property
    def retry_after(self) -> float | None:
        """Seconds until the same call would be admitted if nobody else came.

        `None` for an admission, and for a refusal that no waiting ends (a limit of 0).
        """
        return _seconds(self.retry_after_us)

    @property
    def reset_after(self) -> float | None:
        """Seconds until the binding rule counts nothing any more."""
        return _seconds(self.reset_after_us)

    @property
    def results(self) -> tuple[RuleResult, ...]:
        """What each rule said, in the order of the rules."""
        return tuple(
            RuleResult(
                name, v.allowed, v.limit, v.remaining, _seconds(v.retry_after_us), _seconds(v.reset_after_us)
            )
            for name, v in zip(self.names, self.verdicts, strict=True)
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all rules, in order."""
        return self[5]  # type: ignore[return-value]  # by layout

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """What each rule said, in microseconds, in the order of the rules."""
        if self[7] is None:
            return (Verdict(*self[:5]),) if self.names else ()  # type: ignore[arg-type]  # by layout
        return self[7]  # type: ignore[return-value]  # by layout

    @property
    def rule(self) -> str | None:
        """Name of the rule that binds; `None` without rules."""
        return self.names[cast(int, self[6])] if self.names else None

    @property
    def denied_by(self) -> str | None:
        """Name of the rule that said no; `None` for an admission."""
        return None if self.allowed else self.rule

    @property
    def degraded(self) -> bool:
        """Whether the store could not be asked and the failure policy answered instead."""
        return self[8]  # type: ignore[return-value]  # by layout

    def raise_if_denied(self) -> Decision:
        """Return this decision if it admits.

        Raises:
            RateLimited: It refuses.
        """
        if not self.allowed:
            raise RateLimited(self)
        return self

    def __bool__(self) -> bool:
        return self.allowed

    def __repr__(self) -> str:
        return (
            f"Decision(allowed={self.allowed}, limit={self.limit}, remaining={self.remaining}, "
            f"retry_after={self.retry_after}, reset_after={self.reset_after}, rule={self.rule!r}"
            f"{', degraded=True' if self.degraded else ''})"
        )

    def __str__(self) -> str:
        note = " (degraded: the store could not be asked)" if self.degraded else ""
        if self.limit is None:
            return f"{'allowed' if self.allowed else 'denied'}: no rule applies{note}"
        if self.allowed:
            return f"allowed by {self.rule}: {self.remaining} of {self.limit} left{note}"
        wait = "never admitted" if self.retry_after is None else f"retry in {_readable(self.retry_after)} s"
        return f"denied by {self.rule}: {self.remaining} of {self.limit} left, {wait}{note}"

    def __reduce__(self) -> tuple[object, tuple[tuple[object, ...]]]:
        return _restore, (tuple(self),)


def _restore(fields: tuple[object, ...]) -> Decision:
    return tuple.__new__(Decision, fields)


UNLIMITED: Decision = tuple.__new__(Decision, (True, None, None, None, None, (), 0, None, False))
"""The answer of a limiter without rules."""


def _readable(seconds: float) -> str:
    """Return seconds to the microsecond, without an exponent and without idle zeros."""
    return f"{seconds:.6f}".rstrip("0").rstrip(".")


def _seconds(microseconds: int | None) -> float | None:
    return None if microseconds is None else microseconds / MICROSECONDS


def _binding(verdicts: Sequence[Verdict]) -> int:
    """Return the index of the rule that binds; the first one among equals."""
    binding, least = 0, None
    longest = -1
    for index, (allowed, _, remaining, retry_after_us, _) in enumerate(verdicts):
        if not allowed:
            if retry_after_us is None:
                return index  # nothing keeps a caller waiting longer than for ever
            if retry_after_us > longest:
                binding, longest = index, retry_after_us
        elif longest < 0 and (least is None or remaining < least):
            binding, least = index, remaining
    return binding
