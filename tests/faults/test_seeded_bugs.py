"""The checker finds each seeded bug of a store, and finds nothing in the same store without a bug."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from tests.faults import actor
from tests.faults.actor import cancel_after_turns
from tests.faults.checker import check
from tests.faults.history import History
from tests.faults.recording import read_file
from tests.faults.traffic import subjects
from tests.faults.worker import Worker, WorkerConfig

SCALE = 10
CALLS = 2000
BURST = 200
"""With this size of bursts, the calls make 100,000 decisions."""

HOLDING_CALLS = 60_000
"""Calls that include 3,000 cancelled holds, so that several leak: no later call may check the key of a single leak."""


def violations(
    folder: Path, bug: str, calls: int, seed: int, *, tasks: bool = False, burst: int = 1
) -> set[str]:
    """Return the kinds of violations in the calls of one worker on a store in memory.

    The result is reproducible: the clock advances per reading, one thread or event loop makes all calls, and calls are
    cancelled after a number of loop iterations.
    """
    path = folder / "0"
    config = WorkerConfig(
        "memory://",
        str(path),
        seed,
        SCALE * (5 if burst > 1 else 1),
        tasks=tasks,
        actors=4 if tasks else 1,
        calls=calls,
        burst=burst,
        cancels=3,
        broken=bug,
    )
    with patch.object(actor, "cancel_later", cancel_after_turns):
        Worker(config).run()
    limiters = {name: subject.specs() for name, subject in subjects(config.scale).items()}
    history = History(limiters, read_file(path, 0), released_within_us=0)
    assert len(history.calls) > calls * 0.9
    return {found.kind for found in check(history)}


def test_one_charge_in_ten_thousand_that_is_forgotten_is_found(tmp_path: Path) -> None:
    assert "forgotten units" in violations(tmp_path, "forgets", CALLS, seed=1, burst=BURST)


def test_one_cancelled_hold_in_a_thousand_that_leaks_is_found(tmp_path: Path) -> None:
    assert "unexplained units" in violations(tmp_path, "leaks", HOLDING_CALLS, seed=1, tasks=True)


def test_a_renewal_that_loses_its_place_when_it_is_cancelled_is_found(tmp_path: Path) -> None:
    assert "unexplained units" in violations(tmp_path, "renews another", 5000, seed=1, tasks=True)


def test_a_store_that_fails_open_once_is_found(tmp_path: Path) -> None:
    assert "too many" in violations(tmp_path, "fails open", CALLS, seed=1, burst=BURST)


@pytest.mark.parametrize("burst", [1, BURST])
@pytest.mark.parametrize("tasks", [False, True])
def test_nothing_is_found_without_a_bug(tmp_path: Path, tasks: bool, burst: int) -> None:
    assert violations(tmp_path, "", 5000 if burst == 1 else CALLS, seed=1, tasks=tasks, burst=burst) == set()
