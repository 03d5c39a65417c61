"""A fixed set of simulations: nothing is violated, and a seed replays exactly."""

from __future__ import annotations

import pytest

from tests.simulation.run import STORES, run

SEEDS = range(1000, 1100)
PER_TEST = 20


@pytest.mark.parametrize("first", SEEDS[::PER_TEST])
def test_promises_hold_under_simulated_faults(first: int) -> None:
    outcomes = [run(seed) for seed in range(first, first + PER_TEST)]
    assert [str(outcome) for outcome in outcomes if outcome.violations] == []
    assert sum(sum(outcome.faults.values()) for outcome in outcomes) > 200


@pytest.mark.parametrize("store", sorted(set(STORES)))
def test_seed_replays_exactly(store: str) -> None:
    for seed in range(3):
        first, second = run(seed, store), run(seed, store)
        assert (first.trace, first.faults) == (second.trace, second.faults)
