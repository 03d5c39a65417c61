"""Lines of an access log that `headgate replay` decides in a minute on one core, beside a plain `awk` count of the file.

The log is made up: a combined access log over an hour of callers with very different habits. `awk` counts the lines of each
caller, which reads every line and keeps a figure by key, but parses no time and decides nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.harness import Target
from headgate import build
from headgate.policy import parse_policy
from headgate_server.replay import LogCounts, LogSource, Selection, Simulation, read_requests, run

LINES = 1_000_000
QUICK_LINES = 100_000
TRACED_LINES = 20_000
"""Of the logs whose memory is traced, which takes many times as long."""
BOUND = 1_000_000.0
POLICIES = {
    "one rule": 'rules = ["100/minute"]',
    "one token bucket": 'rules = ["100/minute burst 20"]',
    "two rules": 'rules = ["100/minute", "1000/hour"]',
}
START = 1_714_564_800


def make_log(file: Path, lines: int, keys: int | None) -> None:
    """Write a log of so many lines, and at most so many callers; without a number every line has another one."""
    chance = random.Random(1)
    with file.open("w", encoding="ascii") as log:
        for number in range(lines):
            key = number if keys is None else int(chance.paretovariate(0.5)) % keys
            moment = datetime.fromtimestamp(START + number * 3600 // lines, UTC)
            log.write(
                f"10.{key >> 16 & 255}.{key >> 8 & 255}.{key & 255} - - [{moment:%d/%b/%Y:%H:%M:%S} +0000] "
                f'"GET /api/items/{number % 500}?page=2 HTTP/1.1" 200 {chance.randrange(20_000)} "-" '
                f'"Mozilla/5.0 (X11; Linux x86_64; rv:102.0) Gecko/20100101 Firefox/102.0"\n'
            )


def replay(file: Path, policy: str, *, traced: bool = False) -> tuple[float, int]:
    """Return the CPU seconds that a replay took, and the most bytes that it held, if they are traced."""
    counts = LogCounts()
    source = LogSource(str(file))
    simulation = Simulation(parse_policy(f"[limiters.api]\n{policy}").limiters["api"])
    if traced:
        tracemalloc.start()
    start = time.process_time()
    run(read_requests([source], Selection(), counts), [simulation], counts)
    simulation.as_json()
    taken = time.process_time() - start
    most = tracemalloc.get_traced_memory()[1] if traced else 0
    if traced:
        tracemalloc.stop()
    source.close()
    return taken, most


def awk(file: Path) -> float:
    """Return the seconds that `awk` takes to count the lines of each caller; not a number if there is none."""
    program = shutil.which("awk")
    if program is None:
        return float("nan")
    start = time.monotonic()
    script = "{ seen[$1]++ } END { for (key in seen) n++; print NR, n }"
    subprocess.run([program, script, str(file)], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - start


def main() -> int:
    """Measure, print, and return 1 if the target was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_LINES:,} lines instead of {LINES:,}")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    lines = QUICK_LINES if options.quick else LINES
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder:
        file = Path(folder) / "access.log"
        print(f"core {build.describe()}; writing {lines:,} lines", file=sys.stderr)
        make_log(file, lines, 50_000)
        seconds = awk(file)
        found["awk count"] = lines / seconds * 60
        for name, policy in POLICIES.items():
            print(f"replaying: {name}", file=sys.stderr)
            taken, _ = replay(file, policy)
            found[name] = lines / taken * 60
        few, many = Path(folder) / "few.log", Path(folder) / "many.log"
        make_log(few, TRACED_LINES, 1_000)
        make_log(many, TRACED_LINES, None)
        memory = {
            name: replay(log, 'rules = ["100/second"]', traced=True)[1] / 2**20
            for name, log in (("few callers", few), ("all different", many))
        }
    print(f"Lines a minute, one core, {lines:,} lines")
    for name, rate in found.items():
        print(f"  {name:<18} {rate:>14,.0f}")
    print(f"Most memory held, in MiB, {TRACED_LINES:,} lines, a rule of one second")
    for name, size in memory.items():
        print(f"  {name:<18} {size:>14,.1f}")
    target = Target("replayed lines a minute", BOUND, found["one rule"], False, "one rule")
    print(f"{target.name}: {target.measured:,.0f}, at least {BOUND:,.0f} wanted: {target.verdict}")
    if options.json:
        Path(options.json).write_text(json.dumps({"lines": lines, "rates": found, "memory": memory}))
    return 0 if target.reached else 1


if __name__ == "__main__":
    sys.exit(main())
