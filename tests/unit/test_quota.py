"""Quotas as text, and messages for invalid text."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import ConfigError, Quota
from headgate.quota import (
    MAX_PERIOD_US,
    MAX_UNITS,
    MIN_PERIOD_US,
    format_period,
    parse_calendar,
    parse_quotas,
    period_from,
)

MILLISECOND, SECOND, MINUTE, HOUR = 1_000, 1_000_000, 60_000_000, 3_600_000_000
DAY, WEEK = 24 * HOUR, 168 * HOUR


@pytest.mark.parametrize(
    ("text", "limit", "period_us", "burst"),
    [
        ("5/minute", 5, MINUTE, None),
        ("5 per minute", 5, MINUTE, None),
        ("100/15m", 100, 15 * MINUTE, None),
        ("10/s burst 20", 10, SECOND, 20),
        ("1000/day", 1000, DAY, None),
        ("3 per 2 hours", 3, 2 * HOUR, None),
        ("2/week", 2, WEEK, None),
        ("0/minute", 0, MINUTE, None),
        ("1/1ms", 1, MIN_PERIOD_US, None),
        ("1/ms", 1, MILLISECOND, None),
        ("1/366 days", 1, MAX_PERIOD_US, None),
        ("1/366d", 1, MAX_PERIOD_US, None),
        (f"{MAX_UNITS}/s", MAX_UNITS, SECOND, None),
        (f"1/s burst {MAX_UNITS}", 1, SECOND, MAX_UNITS),
        ("  5 / 2  Minutes  BURST  7 ", 5, 2 * MINUTE, 7),
        ("5 PER MINUTE", 5, MINUTE, None),
        ("007/01s", 7, SECOND, None),
        ("5\tper\nhour", 5, HOUR, None),
        ("5per minute", 5, MINUTE, None),
        ("0" * 6000 + "5/" + "0" * 6000 + "1s", 5, SECOND, None),
    ],
)
def test_text_is_parsed_as_a_quota(text: str, limit: int, period_us: int, burst: int | None) -> None:
    assert Quota.parse(text) == Quota(limit, period_us, burst)


@pytest.mark.parametrize(
    ("words", "period_us"),
    [
        (("ms", "millisecond", "milliseconds"), MILLISECOND),
        (("s", "sec", "secs", "second", "seconds"), SECOND),
        (("m", "min", "mins", "minute", "minutes"), MINUTE),
        (("h", "hr", "hrs", "hour", "hours"), HOUR),
        (("d", "day", "days"), DAY),
        (("w", "week", "weeks"), WEEK),
    ],
)
def test_all_names_of_time_units_are_accepted(words: tuple[str, ...], period_us: int) -> None:
    for word in words:
        assert Quota.parse(f"5/{word}").period_us == period_us
        assert Quota.parse(f"5 per 3 {word.upper()}").period_us == 3 * period_us


@pytest.mark.parametrize(
    ("text", "problem", "place"),
    [
        ("", "a whole number of units", "the text is empty (column 1)"),
        ("   ", "a whole number of units", "the text is empty (column 4)"),
        ("-5/minute", "a whole number of units", "at '-5/minute' (column 1)"),
        ("+5/minute", "a whole number of units", "at '+5/minute' (column 1)"),
        ("1.5/minute", "a whole number of units", "at '1.5/minute' (column 1)"),
        ("1,000/minute", "a whole number of units", "at '1,000/minute' (column 1)"),
        ("1_000/minute", "a whole number of units", "at '1_000/minute' (column 1)"),
        ("five/minute", "a whole number of units", "at 'five/minute' (column 1)"),
        (
            "\u0665/minute",
            "a whole number of units",
            "at '\u0665/minute' (column 1)",
        ),  # an Arabic-Indic digit
        ("/minute", "a whole number of units", "at '/minute' (column 1)"),
        ("9007199254740992/s", "more than 9007199254740991", "at '9007199254740992/s' (column 1)"),
        ("9" * 9000 + "/s", "more than 9007199254740991", "(column 1)"),
        ("5", "'/' or 'per'", "at the end (column 2)"),
        ("5 minutes", "'/' or 'per'", "at 'minutes' (column 3)"),
        ("5 permin", "'/' or 'per'", "at 'permin' (column 3)"),
        ("5//minute", "a unit of time", "at '/minute' (column 3)"),
        ("5/", "a unit of time", "at the end (column 3)"),
        ("5/15", "a unit of time", "at the end (column 5)"),
        ("5/fortnight", "a unit of time", "at 'fortnight' (column 3)"),
        ("5/1.5m", "a unit of time", "at '1.5m' (column 3)"),
        ("5/-1m", "a unit of time", "at '-1m' (column 3)"),
        ("5/monat", "a unit of time", "at 'monat' (column 3)"),
        ("5/m2", "a unit of time", "at 'm2' (column 3)"),
        ("5/0s", "from 1 ms to 366 days", "at '0s' (column 3)"),
        ("5/367 days", "from 1 ms to 366 days", "at '367 days' (column 3)"),
        ("5/ 53w", "from 1 ms to 366 days", "at '53w' (column 4)"),
        ("5/" + "9" * 9000 + "s", "from 1 ms to 366 days", "(column 3)"),
        ("5/minute!", "the end, ';' or 'burst'", "at '!' (column 9)"),
        ("5/minute maybe", "the end, ';' or 'burst'", "at 'maybe' (column 10)"),
        ("5/minute burst", "at least 1, after 'burst'", "at the end (column 15)"),
        ("5/minute burst 0", "at least 1, after 'burst'", "at '0' (column 16)"),
        ("5/minute burst -1", "at least 1, after 'burst'", "at '-1' (column 16)"),
        ("5/minute burst 1.5", "at least 1, after 'burst'", "at '1.5' (column 16)"),
        ("5/minute burst 9007199254740992", "more than 9007199254740991", "(column 16)"),
        ("5/minute burst 2 2", "the end, ';' or 'burst'", "at '2' (column 18)"),
        ("0/minute burst 5", "a limit of 0 has no burst", "at '5' (column 16)"),
        ("5/minute; 6/hour", "one quota only", "at '; 6/hour' (column 9)"),
    ],
)
def test_error_quotes_the_invalid_text_marks_the_position_and_suggests_a_fix(
    text: str, problem: str, place: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Quota.parse(text)
    message = str(caught.value)
    assert repr(text) in message
    assert problem in message
    assert place in message
    assert Quota.parse(message.split("write for example '")[1].split("'")[0]) == Quota(5, MINUTE)


def test_several_quotas_are_separated_by_semicolons() -> None:
    assert parse_quotas("5/minute; 50/hour;10/s burst 20") == (
        Quota(5, MINUTE),
        Quota(50, HOUR),
        Quota(10, SECOND, 20),
    )
    assert parse_quotas("5/minute;") == parse_quotas("5/minute") == (Quota(5, MINUTE),)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("5/minute; x/hour", "at 'x/hour' (column 11)"),
        ("5/minute;;6/hour", "at the end (column 10)"),
        (";5/minute", "at the end (column 1)"),
        ("5/minute; 6/hour 7/day", "at '7/day' (column 18)"),
        (";;", "at the end (column 1)"),
        ("", "the text is empty"),
    ],
)
def test_error_in_several_quotas_quotes_all_and_marks_the_invalid_one(text: str, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_quotas(text)
    assert repr(text) in str(caught.value)
    assert place in str(caught.value)


@pytest.mark.parametrize("wrong", [5, None, b"5/minute", ["5/minute"]])
def test_quota_must_be_text(wrong: object) -> None:
    for parse in (Quota.parse, parse_quotas):
        with pytest.raises(ConfigError, match="a quota is text, not"):
            parse(wrong)  # type: ignore[arg-type]


quotas = st.builds(
    Quota,
    st.integers(1, MAX_UNITS),
    st.integers(1, MAX_PERIOD_US // MILLISECOND).map(lambda ms: ms * MILLISECOND),
    st.none() | st.integers(1, MAX_UNITS),
) | st.builds(Quota, st.just(0), st.sampled_from([MILLISECOND, MINUTE, WEEK, 2 * WEEK, MAX_PERIOD_US]))


@given(quotas)
def test_formatted_quota_parses_to_the_same_quota(quota: Quota) -> None:
    assert Quota.parse(str(quota)) == quota
    assert parse_quotas(f"{quota}; {quota}") == (quota, quota)


@given(st.text(max_size=20) | st.text(alphabet="0159/ permsindhuwkt;.-", max_size=20))
def test_any_text_is_a_quota_or_a_config_error_that_quotes_it(text: str) -> None:
    error = None
    try:
        quotas = parse_quotas(text)
    except ConfigError as caught:
        error = str(caught)
    if error is None:
        assert all(isinstance(quota, Quota) for quota in quotas)
    else:
        assert repr(text) in error
        assert "write for example '5/minute'" in error


@pytest.mark.parametrize(
    ("quota", "text"),
    [
        (Quota(5, MINUTE), "5/minute"),
        (Quota(5, MILLISECOND), "5/millisecond"),
        (Quota(100, 15 * MINUTE), "100/15m"),
        (Quota(1, 90 * SECOND), "1/90s"),
        (Quota(1, WEEK), "1/week"),
        (Quota(1, 2 * WEEK), "1/14d"),
        (Quota(1, 1500 * MILLISECOND), "1/1500ms"),
        (Quota(10, SECOND, 20), "10/second burst 20"),
    ],
)
def test_quota_is_formatted_with_the_largest_possible_unit(quota: Quota, text: str) -> None:
    assert str(quota) == text


def test_periods_have_short_forms_for_names() -> None:
    assert [format_period(us) for us in (MILLISECOND, SECOND, MINUTE, HOUR, DAY, WEEK)] == [
        "1ms",
        "1s",
        "1m",
        "1h",
        "1d",
        "1w",
    ]


def test_quota_is_made_of_numbers_and_seconds_are_rounded() -> None:
    assert Quota.of(5, 1.001, burst=7) == Quota(5, 1_001_000, 7)


@pytest.mark.parametrize(
    "arguments",
    [
        (-1, MINUTE),
        (True, MINUTE),
        (1.0, MINUTE),
        ("5", MINUTE),
        (MAX_UNITS + 1, MINUTE),
        (5, 0),
        (5, MIN_PERIOD_US - 1),
        (5, MAX_PERIOD_US + MILLISECOND),
        (5, 1_500),
        (5, 60.0),
        (5, MINUTE, 0),
        (5, MINUTE, MAX_UNITS + 1),
        (5, MINUTE, 1.5),
        (0, MINUTE, 5),
    ],
)
def test_numbers_that_cannot_be_counted_exactly_are_refused(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        Quota(*arguments)


def test_the_largest_and_smallest_periods_are_allowed() -> None:
    assert Quota(5, MIN_PERIOD_US).period_us == 1_000
    assert Quota(5, MAX_PERIOD_US).period_us == 366 * DAY
    assert Quota.of(5, 0.001).period_us == MIN_PERIOD_US
    assert Quota.of(5, 366 * 86_400).period_us == MAX_PERIOD_US


def test_a_quota_is_a_value() -> None:
    quota = Quota(5, MINUTE, 7)
    assert {quota, Quota(5, MINUTE, 7)} == {quota}
    assert quota != Quota(5, MINUTE)
    assert pickle.loads(pickle.dumps(quota)) == copy.deepcopy(quota) == quota
    with pytest.raises(AttributeError):
        quota.limit = 6  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "rule"), [("5/month", "5/month"), ("12 per years", "12/year"), ("0/Month", "0/month")]
)
def test_months_and_years_are_allowed_only_in_calendar_quotas(text: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rf"write the rule calendar\('{rule}', timezone='UTC'\)"):
        Quota.parse(text)


@pytest.mark.parametrize(
    ("text", "read"),
    [("5/day", (5, "day")), ("7 per weeks", (7, "week")), ("0/Month", (0, "month")), ("1/year", (1, "year"))],
)
def test_calendar_quota_is_parsed(text: str, read: tuple[int, str]) -> None:
    assert parse_calendar(text) == read


@pytest.mark.parametrize(
    "text", ["5/hour", "5/2 months", "5/month burst 3", "5/month; 6/day", "5", "/month", "5/fortnight"]
)
def test_invalid_calendar_quota_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        parse_calendar(text)


@pytest.mark.parametrize("period", ["60s", "1 minute", "minute", 60, 60.0, timedelta(minutes=1)])
def test_period_is_parsed_from_text_seconds_or_timedelta(period: Any) -> None:
    assert period_from(period, "lease") == 60_000_000


@pytest.mark.parametrize(
    "period", ["60", "60s x", "month", 0, 0.0001, -1, True, None, float("nan"), 367 * 86_400, timedelta(0)]
)
def test_error_for_an_invalid_period_names_the_argument(period: Any) -> None:
    with pytest.raises(ConfigError, match="lease"):
        period_from(period, "lease")
