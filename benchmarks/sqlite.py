"""Hits per second on a SQLite file, one key, by the wall clock, and the CPU time of a hit.

pyrate-limiter's bucket comes in two forms (README, "SQLiteBucket"). They promise different things, so read them apart:

* as its README makes it, it is for one process, with a rollback journal and synchronous=FULL: every admitted hit waits until
  the disk has it. Ours does not, and may lose the last moments when the machine dies; so much of the ratio is the disk's.
  The target is judged by this form, the one that its users have. It refuses without a transaction.
* with `use_file_lock=True` several processes can share it, in WAL mode with synchronous=NORMAL, as ours does: the ratio to
  this form, in the table too, is what the code alone makes of the same promise.

A bucket there is one key's; so one key it is.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

from benchmarks.contenders import HEADGATE, Driver, Rule
from benchmarks.harness import (
    Panel,
    Progress,
    Result,
    Runner,
    Scale,
    Section,
    Target,
    interleave,
    notes,
    number,
    table,
    worst_of,
)

Build = Callable[[Rule, Path], Driver]
STEPS = 3
AS_IN_ITS_README = "pyrate-limiter"
LOW_LIMIT = 100
"""Of the rule that refuses; the peer counts so many rows on each try."""


def run(scale: Scale, progress: Progress) -> Iterator[Section]:
    """Measure admitted hits, then refused ones."""
    measured: dict[str, dict[str, Result]] = {}
    cpu: dict[str, Result] = {name: Result() for name in CONTENDERS}
    for outcome in ("admitted", "refused"):
        progress.begin(f"SQLite: {outcome}")
        with tempfile.TemporaryDirectory() as folder:
            runners = {
                name: _runner(build, Path(folder, str(i)), outcome == "refused", scale.calls // 20, cpu[name])
                for i, (name, build) in enumerate(CONTENDERS.items())
            }
            measured[outcome] = interleave(runners, scale.rounds, progress)
    rows = [
        [name, *(found[name].cell for found in measured.values()), number(cpu[name].median, 1)]
        for name in CONTENDERS
    ]
    yield Section(
        "sqlite",
        tables=[
            table("SQLite, one key: hits per second, median", ["", *measured, "CPU µs, admitted"], rows),
            *notes(measured.values()),
        ],
        data={**measured, "CPU µs, admitted": cpu},
        targets=[_target(AS_IN_ITS_README, measured["admitted"])],
        panels=[
            Panel(
                "SQLite: admitted hits per second (more is better)",
                "/s",
                [(n, r.median, number(r.median)) for n, r in measured["admitted"].items() if r.samples],
            )
        ],
    )


def _target(peer: str, found: dict[str, Result]) -> Target:
    ratios = {name: found[name].times(found[peer]) for name in CONTENDERS if name.startswith(HEADGATE)}
    return worst_of(f"SQLite, admitted hits ÷ {peer}", 10.0, ratios, at_most=False)


def _runner(build: Build, folder: Path, refused: bool, hits: int, cpu: Result) -> Runner:
    """Return what makes a new database, brings it into the state of the case, and times the hits."""
    folder.mkdir()
    files = (folder / f"{i}.sqlite" for i in count())

    def sample() -> float:
        driver = build(Rule("", LOW_LIMIT if refused else 2 * hits), next(files))
        for _ in range(LOW_LIMIT if refused else 10):
            driver.hit("user:0")
        started, worked = time.perf_counter(), time.thread_time_ns()
        for _ in range(hits):
            answer = driver.hit("user:0")
        elapsed, worked = time.perf_counter() - started, time.thread_time_ns() - worked
        driver.close()
        if not refused:
            cpu.samples.append(worked / hits / 1000)
        if driver.allowed(answer) is refused:
            raise RuntimeError(f"answered {answer}")
        return hits / elapsed

    return sample


def _headgate(kind: str, rule: Rule, path: Path) -> Driver:
    import headgate

    make_rule = getattr(headgate, kind)
    limiter = headgate.Limiter(
        make_rule(f"{rule.limit}/{rule.period}s"), name="bench", store=f"sqlite:///{path}"
    )
    return Driver(limiter.hit, limiter.close)


def _pyrate(rule: Rule, path: Path, *, use_file_lock: bool) -> Driver:
    from pyrate_limiter import Limiter, Rate, SQLiteBucket

    bucket = SQLiteBucket.init_from_file(
        [Rate(rule.limit, rule.period * 1000)], db_path=str(path), use_file_lock=use_file_lock
    )
    limiter = Limiter(bucket)
    return Driver(partial(limiter.try_acquire, blocking=False), limiter.close)


CONTENDERS: dict[str, Build] = {
    f"{HEADGATE}: token_bucket": partial(_headgate, "token_bucket"),
    f"{HEADGATE}: sliding_window": partial(_headgate, "sliding_window"),
    AS_IN_ITS_README: partial(_pyrate, use_file_lock=False),
    "pyrate-limiter, WAL and file lock": partial(_pyrate, use_file_lock=True),
}
