"""The thread driver, with threads that switch in the order that a seed decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

import headgate.stores.remote.threads as driver
from headgate.stores.redis.peer import RedisPeer
from tests.simulation.defects import may_always_repeat
from tests.simulation.threads import run_threads

SEEDS = 200


def test_promises_hold_in_threads_under_simulated_faults() -> None:
    outcomes = [run_threads(seed) for seed in range(SEEDS)]
    assert [str(outcome) for outcome in outcomes if outcome.violations] == []
    assert sum(sum(outcome.faults.values()) for outcome in outcomes) > 100


def test_seed_of_threads_replays_exactly() -> None:
    for seed in range(5):
        assert run_threads(seed).trace == run_threads(seed).trace


def without_lock(lock: object, work: Callable[..., Any], *arguments: Any) -> Any:
    return work(*arguments)


@pytest.mark.parametrize(
    ("target", "name", "value"),
    [(driver, "while_locked", without_lock), (RedisPeer, "may_repeat", may_always_repeat)],
    ids=["does not lock", "sends a charge twice"],
)
def test_defect_of_threads_is_found(target: Any, name: str, value: Any) -> None:
    with patch.object(target, name, value):
        assert any(run_threads(seed).violations for seed in range(100))
