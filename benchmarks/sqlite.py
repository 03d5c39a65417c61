"""Hits per second of wall-clock time on a SQLite file, with one key.

    python -m benchmarks.sqlite [--quick]

pyrate-limiter's bucket has two modes with different guarantees (README, "SQLiteBucket"):

* By default it is for one process, with a rollback journal and synchronous=FULL: every admitted hit waits until it is on
  disk. Headgate does not wait, and may lose the last hits when the machine crashes; so a part of the ratio is the time of
  the disk. The target refers to this mode, because it is the default.
* With `use_file_lock=True` several processes can share it, in WAL mode with synchronous=NORMAL, like Headgate.

A bucket of pyrate-limiter has one key, so all contenders use one key.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

from benchmarks.contenders import Driver
from benchmarks.harness import (
    HEADGATE,
    Scale,
    Section,
    announce,
    interleave,
    main,
    notes,
    table,
    worst_of,
)

Build = Callable[[int, Path], Driver]
"""Builds a limiter on a file, with a limit per hour."""
PEER = "pyrate-limiter"


def run(scale: Scale) -> Iterator[Section]:
    """Measure admitted hits."""
    announce("SQLite")
    with tempfile.TemporaryDirectory() as folder:
        files = (Path(folder, f"{i}.sqlite") for i in count())
        runners = {
            name: partial(_sample, build, files, scale.calls // 20) for name, build in CONTENDERS.items()
        }
        found = interleave(runners, scale.rounds)
    ours = {name: found[name].times(found[PEER]) for name in CONTENDERS if name.startswith(HEADGATE)}
    rows = [[name, result.cell] for name, result in found.items()]
    yield Section(
        "sqlite",
        [table("SQLite, one key: hits per second", ["", "admitted"], rows), *notes(found)],
        dict(found),
        [worst_of(f"SQLite, admitted hits ÷ {PEER}", 10.0, ours, at_most=False)],
    )


def _sample(build: Build, files: Iterator[Path], hits: int) -> float:
    """Create a database, and return hits per second."""
    driver = build(2 * hits, next(files))
    for _ in range(10):
        driver.hit("user:0")
    started = time.perf_counter()
    for _ in range(hits):
        answer = driver.hit("user:0")
    elapsed = time.perf_counter() - started
    driver.close()
    if not driver.allowed(answer):
        raise RuntimeError(f"answered {answer}")
    return hits / elapsed


def _headgate(kind: str, limit: int, path: Path) -> Driver:
    import headgate

    rule = getattr(headgate, kind)(f"{limit}/hour")
    limiter = headgate.Limiter(rule, name="bench", store=f"sqlite:///{path}")
    return Driver(limiter.hit, limiter.close)


def _pyrate(limit: int, path: Path, *, use_file_lock: bool) -> Driver:
    from pyrate_limiter import Limiter, Rate, SQLiteBucket

    rates = [Rate(limit, 3_600_000)]
    limiter = Limiter(SQLiteBucket.init_from_file(rates, db_path=str(path), use_file_lock=use_file_lock))
    return Driver(partial(limiter.try_acquire, blocking=False), limiter.close)


CONTENDERS: dict[str, Build] = {
    f"{HEADGATE}: token_bucket": partial(_headgate, "token_bucket"),
    f"{HEADGATE}: sliding_window": partial(_headgate, "sliding_window"),
    PEER: partial(_pyrate, use_file_lock=False),
    f"{PEER}, WAL and file lock": partial(_pyrate, use_file_lock=True),
}


if __name__ == "__main__":
    main("sqlite", __doc__, run)
