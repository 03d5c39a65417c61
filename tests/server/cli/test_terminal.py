"""Bars, durations, and escaped text."""

from __future__ import annotations

import io

import pytest

from headgate_server.cli.terminal import Style
from headgate_server.formatting import printable, span
from tests.server.cli.conftest import Terminal

PLAIN = Style(io.TextIOWrapper(io.BytesIO(), "utf-8"))
ASCII = Style(io.TextIOWrapper(io.BytesIO(), "ascii"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.000_001, "0.1 s"),
        (0.3, "0.3 s"),
        (12, "12 s"),
        (12.01, "12.1 s"),
        (59.91, "60 s"),
        (60, "1 min"),
        (60.2, "1 min 1 s"),
        (372, "6 min 12 s"),
        (3599.5, "60 min"),
        (7199, "2 h"),
        (7260, "2 h 1 min"),
        (86_400, "1 d"),
        (31_622_400, "366 d"),
    ],
)
def test_durations_are_rounded_up(seconds: float, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.parametrize(
    ("part", "whole", "bar"),
    [
        (0, 10, "░░░░"),
        (1, 1000, "█░░░"),
        (5, 10, "██░░"),
        (9, 10, "███░"),
        (10, 10, "████"),
        (15, 10, "████"),
        (0, 0, "░░░░"),
        (1, 0, "████"),
    ],
)
def test_bars_are_empty_only_for_0_and_full_only_at_the_limit(part: int, whole: int, bar: str) -> None:
    assert PLAIN.bar(part, whole, 4) == bar


def test_bars_of_decisions() -> None:
    assert PLAIN.stack(2, 2, 4, 4) == "██░░"
    assert PLAIN.stack(1, 0, 1000, 4) == "█   "
    assert PLAIN.stack(0, 0, 0, 4) == "    "
    assert PLAIN.stack(0, 4, 4, 4) == "░░░░"


def test_history() -> None:
    assert PLAIN.history([0, 1, 50, 100]) == " ▁▄█"
    assert PLAIN.history([]) == ""


def test_ascii_bars() -> None:
    assert ASCII.bar(5, 10, 4) == "##.."
    assert ASCII.stack(2, 2, 4, 4) == "##xx"
    assert ASCII.history([0, 3]) == ".#"


def test_colours_of_bars() -> None:
    style = Style(Terminal())
    style.coloured = True
    assert [style.bar(part, 10, 1)[:5] for part in (5, 8, 10)] == ["\x1b[32m", "\x1b[33m", "\x1b[31m"]


def test_control_characters_are_escaped() -> None:
    assert printable("Zoë 😀") == "Zoë 😀"
    assert printable("\x1b[0m\n\u202e\udcff") == "\\x1b[0m\\n\\u202e\\udcff"
