"""Lines of an access log that `headgate replay` decides in a minute on one core.

    python -m benchmarks.replay [--quick]

The log is generated: a combined access log over an hour, of callers with very different rates.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.harness import Result, Scale, Section, Target, announce, main, table
from headgate.policy import parse_policy
from headgate_server.replay import LogCounts, LogSource, Selection, Simulation, read_requests
from headgate_server.replay import run as decide

WANTED = 1_000_000.0
CALLERS = 50_000
START = 1_714_564_800
POLICIES = {
    "one rule": 'rules = ["100/minute"]',
    "one token bucket": 'rules = ["100/minute burst 20"]',
    "two rules": 'rules = ["100/minute", "1000/hour"]',
}


def make_log(file: Path, lines: int) -> None:
    """Write a log with this number of lines."""
    chance = random.Random(1)
    with file.open("w", encoding="ascii") as log:
        for number in range(lines):
            key = int(chance.paretovariate(0.5)) % CALLERS
            moment = datetime.fromtimestamp(START + number * 3600 // lines, UTC)
            log.write(
                f"10.{key >> 16 & 255}.{key >> 8 & 255}.{key & 255} - - [{moment:%d/%b/%Y:%H:%M:%S} +0000] "
                f'"GET /api/items/{number % 500}?page=2 HTTP/1.1" 200 {chance.randrange(20_000)} "-" '
                f'"Mozilla/5.0 (X11; Linux x86_64; rv:102.0) Gecko/20100101 Firefox/102.0"\n'
            )


def replay(file: Path, policy: str) -> float:
    """Return the CPU seconds of a replay."""
    counts, source = LogCounts(), LogSource(str(file))
    simulation = Simulation(parse_policy(f"[limiters.api]\n{policy}").limiters["api"])
    start = time.process_time()
    decide(read_requests([source], Selection(), counts), [simulation], counts)
    simulation.as_json()
    taken = time.process_time() - start
    source.close()
    return taken


def run(scale: Scale) -> Iterator[Section]:
    """Measure a replay with each policy."""
    lines = 10 * scale.keys
    announce(f"replay of {lines:,} lines")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "access.log")
        make_log(file, lines)
        found = {name: Result([lines / replay(file, policy) * 60]) for name, policy in POLICIES.items()}
    rows = [[name, result.cell] for name, result in found.items()]
    target = Target("replayed lines a minute", WANTED, found["one rule"].median, at_most=False)
    yield Section("replay", [table("Lines a minute, one core", ["", "lines"], rows)], dict(found), [target])


if __name__ == "__main__":
    main("replay", __doc__, run)
