"""Simulated leases: no promise is broken, and bugs that are put in are found."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.algorithms.base import Receipts
from headgate.decision import Decision
from headgate.leases.chunks import ChunkBook
from tests.simulation.leases import KINDS, PERIOD_US, Simulation, TooMany, simulate

DECISIONS = 100_000


class EndFromReply(ChunkBook):
    """A book that measures a chunk from the reply, not from the request."""

    def end_of(self, sent: int, decision: Decision) -> int:
        return super().end_of(self.now(), decision)


class EndBeyondWindow(ChunkBook):
    """A book whose chunks cross the edge of a window."""

    def end_of(self, sent: int, decision: Decision) -> int:
        return sent + self.lease_ns


class ReturnedTwice(ChunkBook):
    """A book that returns the rest of a chunk twice."""

    def collect(self) -> list[tuple[Receipts, int]]:
        return 2 * super().collect()


class KeptInFork(ChunkBook):
    """A book whose chunks a forked child keeps, so that both use them: here, every unit is admitted twice."""

    def _take(self, identity: Any, cost: int) -> Any:
        chunk = self._open.get(identity)
        answer = super()._take(identity, cost)
        if answer is not None and chunk is not None and chunk.left % 2:
            chunk.left += cost
        return answer


@pytest.mark.parametrize("kind", KINDS)
def test_no_more_units_are_admitted_than_the_limit(kind: str) -> None:
    rule = KINDS[kind]("900/minute")
    figures = Simulation(7, rule, 3_000_000, processes=3, load=1.1).run(400, DECISIONS)
    assert figures.leased
    assert figures.faults
    assert figures.decisions - figures.leased - figures.refused > 0


@pytest.mark.parametrize("seed", range(4))
def test_random_leases_never_admit_too_many(seed: int) -> None:
    assert simulate(seed, DECISIONS // 2).decisions


@pytest.mark.parametrize(
    ("book", "kind", "lease_us"),
    [
        (EndFromReply, "sliding_log", 1_000_000),
        (EndBeyondWindow, "fixed_window", 3_000_000),
        (ReturnedTwice, "sliding_window", 3_000_000),
        (KeptInFork, "sliding_window", 3_000_000),
    ],
)
def test_bug_is_found(book: type[ChunkBook], kind: str, lease_us: int) -> None:
    def search() -> None:
        for seed in range(30):
            pressed = Simulation(seed, KINDS[kind]("600/minute"), lease_us, processes=3, load=2, book=book)
            pressed.run(300, DECISIONS)

    with pytest.raises(TooMany):
        search()


@pytest.mark.parametrize("kind", ["sliding_log", "token_bucket"])
def test_rules_without_allowance_for_the_lease_are_found(kind: str) -> None:
    def search() -> None:
        for seed in range(30):
            pressed = Simulation(seed, KINDS[kind]("900/minute"), PERIOD_US // 20, processes=3, load=4)
            pressed.forget_allowance()
            pressed.run(300, DECISIONS)

    with pytest.raises(TooMany):
        search()
