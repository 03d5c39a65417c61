"""Calendar windows: their edges in time zones with clock changes, and invalid time zones."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import get_args
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import ConfigError, calendar, calendars
from headgate.calendars import edges_around, window_end, window_number
from headgate.quota import Span

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
ZONES = ("UTC", "Europe/Berlin", "America/Havana", "America/St_Johns", "Pacific/Apia", "Africa/Monrovia")


def us(*when: int, zone: str = "UTC") -> int:
    return (datetime(*when, tzinfo=ZoneInfo(zone)) - EPOCH) // timedelta(microseconds=1)  # type: ignore[misc,arg-type]


@pytest.mark.parametrize(
    ("span", "zone", "inside", "start", "end"),
    [
        ("day", "UTC", (2024, 2, 29, 23, 59), (2024, 2, 29), (2024, 3, 1)),
        ("day", "Europe/Berlin", (2024, 3, 31, 12), (2024, 3, 30, 23), (2024, 3, 31, 22)),  # 23 hours
        ("day", "Europe/Berlin", (2024, 10, 27, 12), (2024, 10, 26, 22), (2024, 10, 27, 23)),  # 25 hours
        ("day", "America/Havana", (2023, 3, 12, 12), (2023, 3, 12, 5), (2023, 3, 13, 4)),  # no midnight
        ("day", "America/Havana", (2023, 11, 5, 12), (2023, 11, 5, 4), (2023, 11, 6, 5)),  # two of them
        ("day", "America/Toronto", (1919, 3, 31, 12), (1919, 3, 31, 4, 30), (1919, 4, 1, 4)),  # from 23:30
        ("day", "America/St_Johns", (2006, 10, 29, 3), (2006, 10, 29, 2, 30), (2006, 10, 30, 3, 30)),
        ("day", "Pacific/Apia", (2011, 12, 30, 9, 59), (2011, 12, 29, 10), (2011, 12, 30, 10)),
        ("day", "Pacific/Apia", (2011, 12, 30, 10), (2011, 12, 30, 10), (2011, 12, 31, 10)),  # the 31st
        ("week", "UTC", (2025, 1, 1), (2024, 12, 30), (2025, 1, 6)),
        ("month", "Europe/Berlin", (2024, 3, 15), (2024, 2, 29, 23), (2024, 3, 31, 22)),
        ("month", "UTC", (2023, 2, 1), (2023, 2, 1), (2023, 3, 1)),
        ("year", "Asia/Tokyo", (2024, 12, 31, 16), (2024, 12, 31, 15), (2025, 12, 31, 15)),
    ],
)
def test_window_has_the_edges_of_its_calendar_period(
    span: Span, zone: str, inside: tuple[int, ...], start: tuple[int, ...], end: tuple[int, ...]
) -> None:
    for now in (us(*inside), us(*start), us(*end) - 1):
        before, first, second, third = edges_around(span, zone, now)
        assert (first, second) == (us(*start), us(*end))
        assert before <= first < second <= third
        assert window_end(span, zone, now) == us(*end)


@given(st.sampled_from(get_args(Span)), st.sampled_from(ZONES), st.integers(0, us(2200, 1, 1)))
def test_windows_follow_each_other_without_gaps(span: Span, zone: str, now: int) -> None:
    before, first, second, third = edges_around(span, zone, now)
    assert before <= first <= now < second <= third
    assert window_number(span, zone, second) > window_number(span, zone, now)
    assert edges_around(span, zone, second)[1] == second
    assert window_number(span, zone, first) == window_number(span, zone, now)


@pytest.mark.parametrize("zone", ["Mars/Olympus", "", "../etc/passwd", "Europe", 5, None])
def test_invalid_time_zone_is_refused(zone: str) -> None:
    with pytest.raises(ConfigError, match="'Europe/Berlin'"):
        calendar("5/month", timezone=zone)


def test_missing_time_zone_database_is_reported_and_utc_works_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> ZoneInfo:
        raise ZoneInfoNotFoundError(name)

    monkeypatch.setattr(calendars, "ZoneInfo", missing)
    with pytest.raises(ConfigError, match="pip install tzdata"):
        calendar("5/month", timezone="Europe/Vaduz")
    assert calendar("5/month").timezone == "UTC"
