"""A short version of `python -m benchmarks.llm`: several processes, and a provider that enforces its limits."""

from __future__ import annotations

from benchmarks.llm import measure
from benchmarks.llm_limiters import Account

SMALL = Account(requests=120, tokens=20_000, period=6)
"""Limits that the tasks reach in a few seconds."""


def test_provider_never_answers_429_to_several_processes() -> None:
    found = measure("headgate", processes=3, tasks=10, seconds=6, account=SMALL)
    assert found["refused"] == 0
    assert found["calls"] > 30
    assert found["processes that ended"] == 2  # one was killed
