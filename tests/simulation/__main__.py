"""Simulates runs with new seeds for some time: `python -m tests.simulation --minutes 30`.

Prints a line of progress every ten seconds and, in the end, how many faults and calls there were. A violation prints its
seed; `--seed N --runs 1` replays it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.simulation.run import run
from tests.simulation.threads import run_threads

THREADS_ONE_IN = 5
"""Every fifth run simulates threads."""
PROGRESS = 10.0
"""Seconds between two lines of progress."""


def main() -> int:
    """Run, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="the first seed; the others follow")
    parser.add_argument("--runs", type=int, default=0, help="end after so many runs")
    parser.add_argument("--store", help="only this store: redis, postgres, server or threads")
    options = parser.parse_args()
    began = shown = time.perf_counter()
    faults: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    calls, bad, seed = 0, 0, options.seed
    while time.perf_counter() < began + 60 * options.minutes and not 0 < options.runs <= runs.total():
        is_threads = options.store == "threads" or (options.store is None and seed % THREADS_ONE_IN == 0)
        outcome = run_threads(seed) if is_threads else run(seed, options.store)
        runs[outcome.store] += 1
        faults.update(outcome.faults)
        calls += outcome.calls
        if outcome.violations:
            bad += 1
            print(outcome, flush=True)
        if time.perf_counter() > shown + PROGRESS:
            shown = time.perf_counter()
            print(
                f"seed {seed}: {faults.total():,} faults, {calls:,} calls, {bad} runs with violations",
                flush=True,
            )
        seed += 1
    seconds, cpu = time.perf_counter() - began, time.process_time()
    print(f"{runs.total():,} runs {dict(runs)}, {calls:,} calls, {bad} runs with violations")
    print(", ".join(f"{kind} {count:,}" for kind, count in faults.most_common()))
    rate = faults.total() / cpu * 3600
    print(f"{faults.total():,} faults in {seconds:.0f} s, {cpu:.0f} s of CPU time: {rate:,.0f} per CPU hour")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
