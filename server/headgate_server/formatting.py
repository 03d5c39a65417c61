"""Formatting of numbers, shares, times and untrusted text in commands and reports."""

from __future__ import annotations

from datetime import UTC, datetime
from math import ceil

_UNITS = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))


def number(value: int | None) -> str:
    """Return a number with separators; a dash if it is unknown."""
    return "-" if value is None else f"{value:,}"


def percent(share: float) -> str:
    """Return a share in per cent; only 0 is written as 0 %, and only 1 as 100 %."""
    if share in (0, 1):
        return f"{share * 100:.0f} %"
    shown = min(max(share * 100, 0.001), 99.999)
    digits = 3 if shown < 0.1 or shown > 99.9 else 2 if shown < 1 or shown > 99 else 1
    return f"{shown:.{digits}f} %"


def printable(text: str) -> str:
    """Return untrusted text, such as a key, with control characters for terminals escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def moment(seconds: float | None) -> str:
    """Return a time in readable form, in UTC."""
    if seconds is None:
        return "-"
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"


def hour(seconds: float) -> str:
    """Return a time to the minute, in UTC."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"


def span(seconds: float) -> str:
    """Return a duration in words, rounded up: `0.3 s`, `12 s`, `6 min 12 s`, `2 h`."""
    if seconds < 60:
        return f"{ceil(round(seconds * 10, 6)) / 10:g} s"
    length, large, step, small = next(unit for unit in _UNITS if seconds >= unit[0])
    whole, rest = divmod(ceil(seconds / step) * step, length)
    return f"{whole:,} {large}" + (f" {rest // step} {small}" if rest else "")
