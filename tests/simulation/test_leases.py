"""Simulated leases: no promise is broken, and seeded bugs are found."""

from __future__ import annotations

import pytest

from headgate import sliding_window, token_bucket
from headgate.algorithms.base import Receipts
from headgate.decision import Decision
from headgate.leases.chunks import Chunk, ChunkBook
from headgate.stores.base import Answer
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
    """A book whose chunks are also used by a forked child, simulated by admitting units twice."""

    def _take(self, chunk: Chunk, cost: int) -> Answer | None:
        answer = super()._take(chunk, cost)
        if answer is not None and chunk.left % 2:
            chunk.left += cost
        return answer


@pytest.mark.parametrize("kind", KINDS)
def test_no_more_units_are_admitted_than_the_limit(kind: str) -> None:
    rule = KINDS[kind]("900/minute")
    figures = Simulation(7, rule, 3_000_000, processes=3, load=1.1).run(400, DECISIONS)
    assert figures.leased
    assert figures.faults
    assert figures.decisions - figures.leased - figures.refused > 0


def test_resets_and_lower_tiers_admit_what_is_documented() -> None:
    rule = sliding_window("6000/minute", tiers={"low": "3000/minute"})
    figures = Simulation(3, rule, 3_000_000, processes=4, load=1.1).run(400, DECISIONS // 3)
    assert figures.resets
    assert figures.leased


def test_rules_with_different_scopes_hold_together() -> None:
    rules = sliding_window("6000/minute", scope="user"), token_bucket("9000/minute", scope="*")
    assert Simulation(5, rules, 1_000_000, processes=4, load=1.1).run(200, DECISIONS // 3).leased


def test_load_of_90_percent_needs_few_calls_and_is_hardly_refused() -> None:
    rule = sliding_window("1000000/20s")
    figures = Simulation(1, rule, 1_000_000, processes=16, load=0.9, has_faults=False).run(35, 10**9)
    assert figures.calls <= figures.decisions / 100
    assert figures.refused <= 0.05 * 1_000_000


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


@pytest.mark.parametrize(("kind", "load"), [("sliding_log", 4), ("token_bucket", 12)])
def test_rules_without_allowance_for_the_lease_are_found(kind: str, load: float) -> None:
    def search() -> None:
        for seed in range(2, 30):
            pressed = Simulation(seed, KINDS[kind]("900/minute"), PERIOD_US // 20, processes=3, load=load)
            pressed.forget_allowance()
            pressed.run(300, DECISIONS)

    with pytest.raises(TooMany):
        search()
