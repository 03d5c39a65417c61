"""Simulate runs with new seeds for some time: `python -m tests.simulation --minutes 30`.

Prints a line of progress every ten seconds, and the number of faults and calls in the end. A violation prints its seed;
`--seed N --runs 1` replays it, with the same `--store` if one was given. `--defects` searches for every defect of
`defects.py` instead, and prints how long that takes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tests.simulation.defects import DEFECTS, run_with
from tests.simulation.run import STORES, run

PROGRESS = 10.0
"""Seconds between two lines of progress."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="first seed; each run adds 1")
    parser.add_argument("--runs", type=int, default=0, help="number of runs; 0 for no limit")
    parser.add_argument("--store", choices=sorted(set(STORES)), help="simulate only this store")
    parser.add_argument("--defects", action="store_true", help="search for reintroduced defects")
    options = parser.parse_args(arguments)
    if options.defects:
        return search(60 * options.minutes)
    began = shown = time.perf_counter()
    cpu = time.process_time()
    faults: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    calls, bad, seed = 0, 0, options.seed
    while time.perf_counter() < began + 60 * options.minutes and not 0 < options.runs <= runs.total():
        outcome = run(seed, options.store)
        runs[outcome.store] += 1
        faults.update(outcome.faults)
        calls += outcome.calls
        if outcome.violations:
            bad += 1
            print(outcome, flush=True)
        if time.perf_counter() > shown + PROGRESS:
            shown = time.perf_counter()
            print(
                f"{shown - began:.0f} s, seed {seed}: {faults.total():,} faults, {calls:,} calls, "
                f"{bad} runs with violations",
                flush=True,
            )
        seed += 1
    print(f"{runs.total():,} runs {dict(runs)}, {calls:,} calls, {bad} runs with violations")
    print(", ".join(f"{kind} {count:,}" for kind, count in faults.most_common()))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    rate = faults.total() / cpu * 3600
    print(f"{faults.total():,} faults in {seconds:.0f} s, {cpu:.0f} s of CPU time: {rate:,.0f} per CPU hour")
    return bool(bad)


def search(seconds: float) -> int:
    """Search for each defect from seed 0 on, for some seconds of CPU time; return the number of missed defects."""
    missed = 0
    for defect in DEFECTS:
        began, seed = time.process_time(), 0
        while not (outcome := run_with(defect, seed)).violations and time.process_time() < began + seconds:
            seed += 1
        missed += not outcome.violations
        took = time.process_time() - began
        first = outcome.violations[0] if outcome.violations else "not found"
        print(f"{defect.name}: seed {seed}, {took:.1f} s of CPU time: {first}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
