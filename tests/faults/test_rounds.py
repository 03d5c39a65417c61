"""A short round of faults on every store; `python -m tests.faults` runs longer."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest

from tests.faults.__main__ import Report, rounds
from tests.faults.rounds import Round
from tests.faults.stores import STORES

CALLS = 1000
LONGEST = 6.0
"""Seconds after which workers end, even before their last call."""


@pytest.mark.parametrize("name", STORES)
def test_every_call_can_be_explained(name: str) -> None:
    with STORES[name](1) as store:
        outcome = Round(store, seed=17, calls=CALLS, seconds=LONGEST, workers=2).run()
    assert outcome.failures == []
    assert outcome.violations == []
    assert any(call.outcome in ("admitted", "refused") for call in outcome.history.calls)


def test_stores_of_a_kind_reach_their_goal_together(tmp_path: Path) -> None:
    report = Report(tmp_path)
    report.decisions.update({"redis": 6 * 10**6, "cluster": 4 * 10**6, "server-redis": 10**6 - 1})
    assert [name for name in STORES if report.is_reached(name)] == ["redis", "valkey", "cluster", "sentinel"]


def test_a_store_that_has_reached_its_goal_is_skipped() -> None:
    reached = {"server"}
    seen = []
    for store, _, _ in rounds(
        random.Random(1),
        {name: partial(STORES[name], 1) for name in ("server", "memory")},
        1,
        reached.__contains__,
    ):
        seen.append(store.name)
        if len(seen) == 2:
            reached.add("memory")
    assert seen == ["memory", "memory"]
