"""A fixed set of simulations: no promise is broken, a seed replays exactly, and nothing real is used."""

from __future__ import annotations

import re
import socket
import time
from unittest.mock import patch

import pytest

from tests.simulation.__main__ import main
from tests.simulation.defects import DEFECTS, put_back
from tests.simulation.run import STORES, run

SEEDS = range(1000, 1048)
PER_TEST = 16


@pytest.mark.parametrize("first", SEEDS[::PER_TEST])
def test_promises_hold_under_simulated_faults(first: int) -> None:
    outcomes = [run(seed) for seed in range(first, first + PER_TEST)]
    assert [str(outcome) for outcome in outcomes if outcome.violations] == []
    assert sum(sum(outcome.faults.values()) for outcome in outcomes) > 100


@pytest.mark.parametrize("store", sorted(set(STORES)))
def test_seed_replays_exactly_without_sockets_and_real_time(store: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a simulation used a socket, or slept")

    first = run(3, store)
    with patch.object(time, "sleep", fail), patch.object(socket.socket, "connect", fail):
        second = run(3, store)
    assert first.calls
    assert first.violations == []
    assert (first.trace, first.faults) == (second.trace, second.faults)


def test_failure_prints_its_seed_and_replays_with_the_same_violations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    defect = next(defect for defect in DEFECTS if defect.name == "renews with a new lease")
    with put_back(defect, 0):
        assert main(["--store", "redis", "--seed", "0", "--runs", "2"]) == 1
        first = capsys.readouterr().out
        seed = re.findall(r"^seed (\d+) on redis:$", first, re.MULTILINE)[0]
        assert main(["--store", "redis", "--seed", seed, "--runs", "1"]) == 1
        second = capsys.readouterr().out
    assert second.partition("1 runs")[0] in first
