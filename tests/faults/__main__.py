"""Run rounds of faults on every store for a given time: `python -m tests.faults`; `--help` lists the options.

Each round prints a line with its figures and the totals. After a violation the exit code is 1, and a folder contains the
history of the round, complete and reduced to the relevant calls; `--replay FILE` checks a history again.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from headgate.testing.servers import ServerError
from tests.faults.checker import check
from tests.faults.history import load, save
from tests.faults.rounds import Outcome, Round
from tests.faults.shrinking import shrink
from tests.faults.stores import STORES, StoreUnderTest

ROUNDS_PER_START = 3
"""Number of rounds after which servers are restarted."""

CALM_ONE_IN = 4
"""One round in this many has no faults; calls are still cancelled and interrupted."""

GOALS = {
    ("memory",): 10**8,
    ("redis", "valkey", "cluster", "sentinel"): 10**7,
    ("postgres", "postgres-async"): 10**6,
    ("sqlite",): 10**6,
    ("server", "server-redis"): 10**6,
}
"""Goals of a long run: the number of decisions per group of stores."""

SHOWN = 5
QUICK = Path("/dev/shm")
"""A folder in memory, if the system has one: there, servers that sync to disk are fast."""


class Report:
    """The figures of a run, and the folder for failures."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.began = time.monotonic()
        self.decisions: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.violations = 0
        self.unjudged = 0
        self.broken_off = 0

    def is_reached(self, store: str) -> bool:
        """Return whether the group of a store has reached its goal."""
        return any(store in kind and self._made(kind) >= goal for kind, goal in GOALS.items())

    def _made(self, kind: tuple[str, ...]) -> int:
        return sum(self.decisions[store] for store in kind)

    def add(self, store: str, seed: int, outcome: Outcome, *, calm: bool) -> None:
        """Count and print a round, and save its history if there are violations or failures."""
        calls = outcome.history.calls if outcome.is_judged else []
        decisions = sum(call.times for call in calls if call.outcome in ("admitted", "refused"))
        self.decisions[store] += decisions
        self.faults.update(outcome.faults)
        self.unjudged += not outcome.is_judged
        wrong = len(outcome.violations) + len(outcome.failures)
        self.violations += wrong
        seconds = int(time.monotonic() - self.began)
        print(
            f"{seconds // 60:3}:{seconds % 60:02} {store:<15} seed {seed:<10} {'calm  ' if calm else 'faults'} "
            f"{decisions:>9,} decisions {sum(outcome.faults.values()):>3} faults {wrong:>3} violations | all: "
            f"{self.decisions.total():,} decisions, {self.faults.total():,} faults, {self.violations} violations",
            flush=True,
        )
        if wrong:
            self._keep(store, seed, outcome)

    def _keep(self, store: str, seed: int, outcome: Outcome) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        whole = self.folder / f"{store}-{seed}.jsonl"
        save(outcome.history, whole)
        print(f"    saved to {whole}")
        for failure in outcome.failures:
            print(f"    {failure}")
        for violation in outcome.violations[:SHOWN]:
            print(f"    {violation}")
        if outcome.violations:
            first = outcome.violations[0]
            small = whole.with_suffix(".small.jsonl")
            save(shrink(outcome.history, first), small)
            print(f"    relevant calls of the first violation: {small}", flush=True)

    def close(self) -> int:
        """Print the totals, and return the exit code."""
        for store, decisions in sorted(self.decisions.items()):
            print(f"{store:<15} {decisions:>12,} decisions")
        for kind, goal in GOALS.items():
            if made := self._made(kind):
                print(f"{made:,} of {goal:,} on {', '.join(kind)}")
        for fault, times in self.faults.most_common():
            print(f"{fault:<25} {times:>6,}")
        if self.broken_off:
            print(f"{self.broken_off} rounds were aborted, because a server did not restart in time")
        if self.unjudged:
            print(f"{self.unjudged} rounds were not checked, because the machine's clock was changed")
        print(
            f"{self.decisions.total():,} decisions, {self.faults.total():,} faults, {self.violations} violations"
        )
        return 1 if self.violations else 0


def main() -> int:
    """Run the command line, and return the exit code."""
    parser = argparse.ArgumentParser(description="Prove the promises of every store under faults.")
    parser.add_argument("--minutes", type=float, default=float(os.environ.get("FAULT_MINUTES", "10")))
    parser.add_argument(
        "--seed", type=int, default=None, help="seed of all random choices; default: a random seed"
    )
    parser.add_argument("--store", action="append", choices=STORES, help="only this store; may be repeated")
    parser.add_argument("--calls", type=int, default=10_000, help="calls of each worker in a round")
    parser.add_argument("--burst", type=int, default=1, help="maximum number of hits in a burst")
    parser.add_argument("--load", type=int, default=1, help="factor of the limits, for large bursts")
    parser.add_argument("--seconds", type=float, default=15.0, help="maximum duration of a round")
    parser.add_argument("--gap", type=float, default=1.0, help="maximum seconds between two faults")
    parser.add_argument(
        "--deadline", type=float, help="deadline of calls to remote stores in seconds, for a busy machine"
    )
    parser.add_argument(
        "--goals",
        action="store_true",
        help="skip stores that have reached the goal of a long run; stop when all have",
    )
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--keep", type=Path, default=Path("faults"), help="folder for histories of failures")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="only check a saved history")
    arguments = parser.parse_args()
    if arguments.replay:
        return replay(arguments.replay)
    if QUICK.is_dir() and shutil.disk_usage(QUICK).free > 2**30:
        tempfile.tempdir = str(QUICK)
    seed = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    print(f"seed {seed}, {arguments.minutes:g} minutes, failures are saved to {arguments.keep}/")
    report = Report(arguments.keep)
    stores = {name: partial(STORES[name], arguments.load) for name in arguments.store or STORES}
    is_over = report.is_reached if arguments.goals else lambda name: False
    for store, round_seed, calm in rounds(random.Random(seed), stores, arguments.minutes, is_over):
        one = Round(
            store,
            round_seed,
            arguments.calls,
            arguments.seconds,
            arguments.workers,
            calm=calm,
            burst=arguments.burst,
            gap=arguments.gap,
            deadline=arguments.deadline,
        )
        try:
            report.add(store.name, round_seed, one.run(), calm=calm)
        except (AssertionError, ServerError) as error:  # on a busy machine, a server did not restart in time
            report.broken_off += 1
            print(f"    {store.name}, seed {round_seed}: the round was aborted: {error}", flush=True)
            store.is_broken = True
    return report.close()


def rounds(
    rng: random.Random,
    stores: Mapping[str, Callable[[], AbstractContextManager[StoreUnderTest]]],
    minutes: float,
    is_over: Callable[[str], bool],
) -> Iterator[tuple[StoreUnderTest, int, bool]]:
    """Yield a store, a seed and whether to omit faults, for each round until the time is over or all goals are reached."""
    due = time.monotonic() + 60 * minutes
    while not all(map(is_over, stores)):
        for name, open_store in stores.items():
            if is_over(name):
                continue
            with open_store() as store:
                for _ in range(ROUNDS_PER_START):
                    if time.monotonic() > due:
                        return
                    if store.is_broken or is_over(name):
                        break
                    yield store, rng.randrange(2**31), rng.randrange(CALM_ONE_IN) == 0


def replay(path: Path) -> int:
    """Check a saved history; return the exit code."""
    found = check(load(path))
    for violation in found:
        print(violation)
    print(f"{len(found)} violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
