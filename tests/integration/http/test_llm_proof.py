"""A short version of `python -m benchmarks.llm`: several processes, and a provider that enforces its limits."""

from __future__ import annotations

from benchmarks.llm import measure


def test_provider_never_answers_429_to_several_processes() -> None:
    found = measure("headgate", processes=3, tasks=10, seconds=6)
    assert found["refused"] == 0
    assert found["calls"] > 30
    assert found["processes that ended"] == 2  # one was killed
