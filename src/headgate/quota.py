"""Quotas: a limit per period, and the parser of their text form.

    5/minute    5 per minute    100/15m    10/s burst 20    3 per 2 hours    2/week    0/minute

A quota is a value without an algorithm; only token buckets use `burst`.

Months and years vary in length, so they are not periods. `calendar` rules use them, and parse their text with
`parse_calendar`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from typing import Literal

from headgate._checks import check_count, is_number
from headgate.clock import to_microseconds
from headgate.errors import ConfigError

__all__ = ["MAX_PERIOD_US", "MAX_UNITS", "MILLISECOND", "Quota", "format_period", "parse_quotas"]

MAX_UNITS = 2**53 - 1
"""The largest whole number that every store counts exactly (Redis scripts count in doubles)."""

MILLISECOND = 1_000
"""Microseconds in a millisecond."""
MIN_PERIOD_US = MILLISECOND
MAX_PERIOD_US = 366 * 24 * 3_600_000_000
"""The longest period of a quota, in microseconds: a leap year."""

_UNITS_US = {
    "ms": MILLISECOND,
    "s": 1_000_000,
    "m": 60_000_000,
    "h": 3_600_000_000,
    "d": 24 * 3_600_000_000,
    "w": 7 * 24 * 3_600_000_000,
}
_LONG_NAMES = {"ms": "millisecond", "s": "second", "m": "minute", "h": "hour", "d": "day", "w": "week"}
_UNIT_NAMES = {"sec": "s", "secs": "s", "min": "m", "mins": "m", "hr": "h", "hrs": "h"} | {
    name: unit for unit, long in _LONG_NAMES.items() for name in (unit, long, f"{long}s")
}

Span = Literal["day", "week", "month", "year"]
"""The windows of a calendar rule."""

SPANS_US: dict[Span, int] = {
    "day": _UNITS_US["d"],
    "week": _UNITS_US["w"],
    "month": 31 * _UNITS_US["d"],
    "year": MAX_PERIOD_US,
}
"""The longest duration of each span without daylight saving time: the period of a calendar rule's quotas."""

_SPAN_NAMES: dict[str, Span] = {"d": "day", "w": "week"}
_SPAN_NAMES |= {name: span for span in SPANS_US for name in (span, f"{span}s")}

_EXAMPLES = "write for example '5/minute', '100 per 15 minutes' or '10/s burst 20'"
_EXAMPLES_OF = {"quota": _EXAMPLES, "calendar quota": "write for example '1000/day' or '10000/month'"}

# Tokens are matched at a known position, so that an error can show where parsing stopped. Only ASCII digits are accepted,
# although int() accepts others.
_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"[0-9]+(?![0-9.,_])")
_PER = re.compile(r"/|per\b", re.IGNORECASE)
_WORD = re.compile(r"[a-z]+(?![a-z0-9_])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Quota:
    """A limit of units per period.

    Attributes:
        limit: Units per period; 0 refuses everything.
        period_us: Length of the period in microseconds: whole milliseconds, from 1 ms to 366 days.
        burst: Highest number of units at once, for a token bucket; `None` means the limit.
    """

    limit: int
    period_us: int
    burst: int | None = None

    def __post_init__(self) -> None:
        check_count("limit", self.limit, 0, MAX_UNITS)
        check_count("period_us", self.period_us, MIN_PERIOD_US, MAX_PERIOD_US)
        if self.period_us % MILLISECOND:
            raise ConfigError(f"period of {self.period_us} us: a period is a whole number of milliseconds")
        if self.burst is not None:
            check_count("burst", self.burst, 1, MAX_UNITS)
            if self.limit == 0:
                raise ConfigError(f"burst {self.burst} with a limit of 0: the bucket would never fill again")

    @classmethod
    def of(cls, limit: int, per: str | float | timedelta, *, burst: int | None = None) -> Quota:
        """Return a quota from a number and a period: text like `90s`, seconds or a timedelta."""
        return cls(limit, period_from(per, "period"), burst)

    @classmethod
    def parse(cls, text: str) -> Quota:
        """Return the quota of a text.

        Raises:
            ConfigError: The text is not a single quota; the message shows the invalid part.
        """
        return _QuotaReader(text).quota()

    def __str__(self) -> str:
        burst = "" if self.burst is None else f" burst {self.burst}"
        return f"{self.limit}/{format_period(self.period_us, long=True)}{burst}"


Quotas = tuple[Quota | None, ...]
"""One quota per rule, instead of the tier's; `None` keeps the tier's."""


def parse_quotas(text: str) -> tuple[Quota, ...]:
    """Return the quotas of a text like `5/minute; 50/hour`, in order."""
    _QuotaReader(text)  # checks the type
    parts = text.split(";")
    if len(parts) > 1 and not parts[-1].strip():
        parts.pop()  # a closing ';' is harmless
    quotas, start = [], 0
    for part in parts:
        quotas.append(_QuotaReader(text, start, start + len(part)).quota())
        start += len(part) + 1
    return tuple(quotas)


def parse_calendar(text: str) -> tuple[int, Span]:
    """Return limit and span of a text like `10000/month`.

    Raises:
        ConfigError: The text is not a calendar quota; the message shows the invalid part.
    """
    return _QuotaReader(text, what="calendar quota").calendar()


def period_from(period: str | float | timedelta, what: str) -> int:
    """Return a period in microseconds, from text like `60s` or `5 minutes`, seconds or a timedelta.

    Raises:
        ConfigError: The period is invalid, or not from 1 ms to 366 days; `what` is its name in the message.
    """
    if isinstance(period, str):
        return _QuotaReader(period, what=what).period()
    seconds = period.total_seconds() if isinstance(period, timedelta) else period
    if not is_number(seconds) or not abs(seconds) < inf:  # also false for NaN
        raise ConfigError(f"a {what} is text like '60s', seconds or a timedelta, not {period!r}")
    period_us = to_microseconds(seconds)
    if not MIN_PERIOD_US <= period_us <= MAX_PERIOD_US or period_us % MILLISECOND:
        raise ConfigError(f"a {what} is whole milliseconds, from 1 ms to 366 days, not {period!r}")
    return period_us


def format_period(period_us: int, *, long: bool = False) -> str:
    """Return a period in the largest unit that divides it: `1m`, `15m`, `90s`; long: `minute`, `15m`."""
    count, unit = _count_and_unit(period_us)
    if long and count == 1:
        return _LONG_NAMES[unit]
    return f"{count}{unit}"


def period_in_words(period_us: int) -> str:
    """Return a period as words for a rule's name: `minute`, `15-minutes`."""
    count, unit = _count_and_unit(period_us)
    return _LONG_NAMES[unit] if count == 1 else f"{count}-{_LONG_NAMES[unit]}s"


def _count_and_unit(period_us: int) -> tuple[int, str]:
    """Return a period in the largest unit that divides it."""
    unit = next(u for u in ("w", "d", "h", "m", "s", "ms") if period_us % _UNITS_US[u] == 0)
    count = period_us // _UNITS_US[unit]
    return (count * 7, "d") if unit == "w" and count > 1 else (count, unit)  # 14d is clearer than 2w


class _QuotaReader:
    """Parser of one quota within a text."""

    def __init__(self, text: str, start: int = 0, end: int | None = None, what: str = "quota") -> None:
        if not isinstance(text, str):
            raise ConfigError(f"a quota is text, not {text!r}; {_EXAMPLES}")
        self.text = text
        self.what = what
        self.at = start
        self.end = len(text) if end is None else end

    def quota(self) -> Quota:
        limit = self._limit()
        period_us = self._period(limit)
        burst = None
        if (word := self._peek(_WORD)) and word.lower() == "burst":
            self._take(_WORD)
            burst_at = self._skip_space()
            burst = self._number("a whole number of units, at least 1, after 'burst'", least=1)
            if limit == 0:
                self.at = burst_at
                raise self._error("a limit of 0 has no burst")
        if self._skip_space() < self.end:
            several = self.text[self.at] == ";"  # the text may then contain only one quota
            raise self._error("expected one quota only" if several else "expected the end, ';' or 'burst'")
        return Quota(limit, period_us, burst)

    def calendar(self) -> tuple[int, Span]:
        limit = self._limit()
        at = self._skip_space()
        span = _SPAN_NAMES.get((self._take(_WORD) or "").lower())
        if span is None or self._skip_space() < self.end:
            self.at = at
            raise self._error("expected day, week, month or year, and nothing else")
        return limit, span

    def period(self) -> int:
        period_us = self._period(None)
        if self._skip_space() < self.end:
            raise self._error("expected the end")
        return period_us

    def _limit(self) -> int:
        limit = self._number("a whole number of units")
        if self._take(_PER) is None:
            raise self._error("expected '/' or 'per'")
        return limit

    def _period(self, limit: int | None) -> int:
        count_at = self._skip_space()
        count = _whole(self._take(_NUMBER) or "1")
        unit_us = self._unit(limit)
        period_us = 0 if count is None else count * unit_us
        if not MIN_PERIOD_US <= period_us <= MAX_PERIOD_US:
            self.at = count_at
            raise self._error("a period is from 1 ms to 366 days")
        return period_us

    def _number(self, expected: str, least: int = 0) -> int:
        at = self._skip_space()
        digits = self._take(_NUMBER)
        if digits is None:
            raise self._error(f"expected {expected}")
        number = _whole(digits)
        if number is None:
            self.at = at
            raise self._error(f"more than {MAX_UNITS} cannot be counted exactly")
        if number < least:
            self.at = at
            raise self._error(f"expected {expected}")
        return number

    def _unit(self, limit: int | None) -> int:
        at = self._skip_space()
        word = (self._take(_WORD) or "").lower()
        name = _UNIT_NAMES.get(word)
        if name is None:
            self.at = at
            if limit is not None and (span := _SPAN_NAMES.get(word)):
                raise ConfigError(
                    f"quota {self.text!r}: a {span} has no fixed length; write the rule "
                    f"calendar('{limit}/{span}', timezone='UTC'), in a policy file "
                    f'{{ kind = "calendar", quota = "{limit}/{span}" }}, or a period in days'
                )
            raise self._error("expected a unit of time (ms, s, m, h, d, w, second, minute, hour, day, week)")
        return _UNITS_US[name]

    def _skip_space(self) -> int:
        match = _SPACE.match(self.text, self.at, self.end)
        self.at = match.end() if match else self.at
        return self.at

    def _peek(self, pattern: re.Pattern[str]) -> str | None:
        match = pattern.match(self.text, self._skip_space(), self.end)
        return match.group() if match else None

    def _take(self, pattern: re.Pattern[str]) -> str | None:
        found = self._peek(pattern)
        if found is not None:
            self.at += len(found)
        return found

    def _error(self, problem: str) -> ConfigError:
        rest = self.text[self.at : self.end]
        place = f"at {rest!r}" if rest.strip() else "at the end"
        if not self.text.strip():
            place = "the text is empty"
        examples = _EXAMPLES_OF.get(self.what, "write for example '60s' or '5 minutes'")
        return ConfigError(
            f"{self.what} {self.text!r}: {problem}, {place} (column {self.at + 1}); {examples}"
        )


def _whole(digits: str) -> int | None:
    """Return the number, or `None` if it exceeds `MAX_UNITS`."""
    digits = digits.lstrip("0") or "0"
    # MAX_UNITS has 16 digits; int() raises a different error for very long numbers.
    return int(digits) if len(digits) <= 16 and int(digits) <= MAX_UNITS else None
