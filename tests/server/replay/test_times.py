"""Formats of times in logs."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate_server.replay.errors import BadLine
from headgate_server.replay.times import TimeReader


@pytest.mark.parametrize(
    ("written", "at"),
    [
        ("10/Oct/2000:13:55:36 -0700", 971_211_336_000_000),
        ("01/May/2024:12:00:00 +0000", 1_714_564_800_000_000),
        ("01/May/2024:17:30:00 +0530", 1_714_564_800_000_000),
        ("2024-05-01T12:00:00Z", 1_714_564_800_000_000),
        ("2024-05-01T14:00:00.25+02:00", 1_714_564_800_250_000),
        ("2024-05-01T12:00:00.123456789Z", 1_714_564_800_123_456),
        ("1714564800", 1_714_564_800_000_000),
        ("1714564800.001", 1_714_564_800_001_000),
        ("1714564800123", 1_714_564_800_123_000),
        ("1714564800123456", 1_714_564_800_123_456),
        ("1714564800123456789", 1_714_564_800_123_456),
        (1714564800.5, 1_714_564_800_500_000),
        (1714564800123, 1_714_564_800_123_000),
        (1714564800123456789, 1_714_564_800_123_456),
        (0, 0),
    ],
)
def test_times_are_read_to_the_microsecond(written: object, at: int) -> None:
    assert TimeReader().read(written) == at


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (None, "no time"),
        ("", "no time"),
        ("-", "no time"),
        (True, "no time"),
        ([], "no time"),
        ("yesterday", "invalid time"),
        ("10/Foo/2000:13:55:36 -0700", "invalid time"),
        ("10/Oct/2000:13:55:36", "invalid time"),
        ("32/Oct/2000:13:55:36 -0700", "invalid time"),
        ("2024-13-01T00:00:00Z", "invalid time"),
        ("1" * 100, "invalid time"),
        ("١٧١٤٥٦٤٨٠٠", "invalid time"),
        (float("nan"), "invalid time"),
        (float("inf"), "invalid time"),
        (10**400, "invalid time"),
        (-1, "time before 1970 or after 2255"),
        ("1960-01-01T00:00:00Z", "time before 1970 or after 2255"),
        ("2300-01-01T00:00:00Z", "time before 1970 or after 2255"),
    ],
)
def test_invalid_times(written: object, reason: str) -> None:
    with pytest.raises(BadLine) as raised:
        TimeReader().read(written)
    assert raised.value.reason == reason


def test_times_without_a_zone_are_utc_and_counted() -> None:
    times = TimeReader()
    assert [times.read("2024-05-01T12:00:00") for _ in range(3)] == [1_714_564_800_000_000] * 3
    assert times.without_zone == 3


def test_an_invalid_time_is_not_replaced_by_the_previous_one() -> None:
    times = TimeReader()
    times.read("1714564800")
    for _ in range(2):
        with pytest.raises(BadLine):
            times.read("x")


@given(st.text() | st.integers() | st.floats() | st.none() | st.binary())
def test_any_value_is_a_time_or_invalid(written: object) -> None:
    with suppress(BadLine):
        assert 0 <= TimeReader().read(written) < 2**53
