"""Start times of days, weeks, months and years in a time zone.

A window begins at the first instant of its first day. If the local clock is set forward over midnight, that is the instant
of the change; if midnight occurs twice, the first one. So windows have no gaps, each begins no earlier than the one before,
and a day may have 23 or 25 hours, or be skipped (Samoa had no 30 December 2011).
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo

from headgate.errors import ConfigError
from headgate.quota import Span

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def check_timezone(name: str | None) -> None:
    """Refuse an unknown time zone.

    Raises:
        ConfigError: The name is unknown, or there is no time zone database on this machine.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"a time zone is a name like 'Europe/Berlin', not {name!r}")
    _zone(name)


def edges_around(span: Span, timezone: str, now: int) -> tuple[int, int, int, int]:
    """Return the starts of four consecutive windows; `now` is in the second one.

    They also cover the time of another clock that differs by up to one window.
    """
    number = window_number(span, timezone, now)
    before, first, second, third = (_start(span, timezone, number + i) for i in (-1, 0, 1, 2))
    return before, first, second, third


def window_end(span: Span, timezone: str, now: int) -> int:
    """Return the end of the window that contains an instant."""
    return _start(span, timezone, window_number(span, timezone, now) + 1)


def window_number(span: Span, timezone: str, now: int) -> int:
    """Return the number of the window that contains an instant; windows of a span and zone are numbered in sequence."""
    local = (_EPOCH + timedelta(microseconds=now)).astimezone(_zone(timezone))
    number = _number(span, local.date())
    # After the local clock was set back over midnight, the date belongs to the previous window again.
    while _start(span, timezone, number + 1) <= now:
        number += 1
    return number


def _number(span: Span, day: date) -> int:
    if span == "day":
        return day.toordinal()
    if span == "week":
        return (day.toordinal() - 1) // 7  # day 1 was a Monday
    return day.year * 12 + day.month - 1 if span == "month" else day.year


def _first_day(span: Span, number: int) -> date:
    if span == "day":
        return date.fromordinal(number)
    if span == "week":
        return date.fromordinal(number * 7 + 1)
    return date(number // 12, number % 12 + 1, 1) if span == "month" else date(number, 1, 1)


@lru_cache(maxsize=4096)
def _start(span: Span, timezone: str, number: int) -> int:
    """Return the first instant of a window."""
    zone = _zone(timezone)
    day = _first_day(span, number)
    midnight = datetime(day.year, day.month, day.day, tzinfo=zone)
    first = _instant(midnight)
    if _local(first, zone) == midnight.replace(tzinfo=None):
        return first
    # The local clock skips this midnight. The change is between its two interpretations.
    early, late = _instant(midnight.replace(fold=1)), first
    while late - early > 1:
        middle = (early + late) // 2
        if _local(middle, zone) < midnight.replace(tzinfo=None):
            early = middle
        else:
            late = middle
    return late


def _instant(local: datetime) -> int:
    return (local.astimezone(UTC) - _EPOCH) // _MICROSECOND


def _local(instant: int, zone: tzinfo) -> datetime:
    return (_EPOCH + timedelta(microseconds=instant)).astimezone(zone).replace(tzinfo=None)


@lru_cache(maxsize=1024)
def _zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC  # works without a database
    try:
        return ZoneInfo(name)
    except (KeyError, OSError, ValueError) as error:  # the last two for names that are not valid paths
        hint = "" if _has_database() else "; there is no time zone database here: pip install tzdata"
        raise ConfigError(f"no time zone {name!r}; write for example 'Europe/Berlin'{hint}") from error


def _has_database() -> bool:
    try:
        ZoneInfo("Europe/Berlin")
    except KeyError:
        return False
    return True
