"""The tour."""

from __future__ import annotations

from headgate_server.cli.tour import tour
from tests.server.cli.conftest import OnTerminal


def test_the_tour_prints_real_decisions() -> None:
    lines: list[str] = []
    tour(fast=True, say=lines.append)
    text = "\n".join(lines)
    assert "60 of 120 admitted" in text
    assert "20 admitted within a tenth of a second" in text
    assert "cem still has 3 of 5" in text
    assert "settled at 300: 700 left" in text
    assert "admitted per tenth of a second: 5 1 1 1 1 1 1 1 1 1 1" in text
    assert text.count("✗ second run") == 1
    assert "\x1b[" not in text


def test_the_tour_is_coloured_on_a_terminal(on_terminal: OnTerminal) -> None:
    code, output = on_terminal("tour", "--fast")
    assert code == 0
    assert "\x1b[32m█████" in output
