"""Common code of the benchmarks: interleaved rounds, medians, tables, targets and JSON.

* A *runner* is a function without arguments that takes one sample and returns one number. `interleave` calls every
  runner once per round, and starts each round with a different runner, so that slow periods of the machine affect all
  runners equally.
* For the same reason, contenders are compared by the median of the ratios within each round.
* A contender that cannot run remains in the table, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

RESULTS = Path(__file__).parent / "results"
HEADGATE = "Headgate"

Runner = Callable[[], float]
T = TypeVar("T")
U = TypeVar("U")


class NotOfferedError(Exception):
    """The contender does not support the measured task."""


@dataclass
class Result:
    """The samples of one contender, or the reason why they are missing."""

    samples: list[float] = field(default_factory=list)
    trouble: str = ""

    @property
    def median(self) -> float:
        """The median of the samples; NaN without samples."""
        return statistics.median(self.samples) if self.samples else float("nan")

    @property
    def cell(self) -> str:
        """The median for a table, or the reason up to the colon; `notes` shows the whole reason."""
        return self.trouble.partition(":")[0] or number(self.median)

    def times(self, other: Result) -> float:
        """Return the median over the rounds of the ratio of this result to another one."""
        if not (self.samples and other.samples):
            return float("nan")
        return statistics.median(
            mine / theirs for mine, theirs in zip(self.samples, other.samples, strict=True)
        )

    def over(self, base: Result) -> Result:
        """Return the difference between this result and another one in each round."""
        if self.trouble or not base.samples:
            return self
        return Result([mine - its for mine, its in zip(self.samples, base.samples, strict=True)])


@dataclass(frozen=True)
class Target:
    """A bound, and the worst measured value."""

    name: str
    bound: float
    measured: float
    at_most: bool
    where: str = ""

    @property
    def verdict(self) -> str:
        """`reached`, `NOT REACHED`, or `not measured` if a measurement is missing."""
        if self.measured != self.measured:
            return "not measured"
        reached = self.measured <= self.bound if self.at_most else self.measured >= self.bound
        return "reached" if reached else "NOT REACHED"


def worst_of(name: str, bound: float, ratios: Mapping[str, float], at_most: bool) -> Target:
    """Return the target with the value of its worst case, or without a value if a case is missing."""
    missing = [case for case, ratio in ratios.items() if ratio != ratio]
    if missing:
        return Target(name, bound, float("nan"), at_most, f"missing: {missing[0]}")
    where = (max if at_most else min)(ratios, key=lambda case: ratios[case])
    return Target(name, bound, ratios[where], at_most, where)


@dataclass(frozen=True)
class Scale:
    """The amount of work of a run."""

    rounds: int
    calls: int
    """Calls per sample."""
    keys: int
    """The number of keys if there are many."""


FULL = Scale(rounds=9, calls=10_000, keys=100_000)
QUICK = Scale(rounds=3, calls=2_000, keys=10_000)


@dataclass
class Section:
    """The results of one table or group of tables."""

    name: str
    tables: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)


def main(name: str, description: str | None, run: Callable[[Scale], Iterable[Section]]) -> None:
    """Run a module from the command line: print its tables and targets, and write its results as JSON."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a rough result: fewer keys, calls and rounds")
    quick = parser.parse_args().quick
    sections = []
    for section in run(QUICK if quick else FULL):
        print(*section.tables, sep="\n", flush=True)
        sections.append(section)
    targets = [target for section in sections for target in section.targets]
    if targets:
        print(_target_table(targets))
    data = {section.name: section.data for section in sections}
    print(
        f"\n{write_json(f'{name}-quick' if quick else name, {**data, 'targets': targets})}", file=sys.stderr
    )


def announce(title: str) -> None:
    """Print the current step on standard error."""
    print(f"{time.strftime('%H:%M:%S')} {title}", file=sys.stderr, flush=True)


def describe(error: BaseException) -> str:
    """Return a short reason why a contender is missing."""
    match error:
        case NotOfferedError():
            return str(error) or "not offered"
        case ImportError():
            return f"not installed: {error.name or error}"
        case _:
            return f"failed: {type(error).__name__}: {error}"


def each(items: Mapping[str, T | Result], step: Callable[[T], U]) -> dict[str, U | Result]:
    """Call a function with every item; replace an item by a result with the reason if the call raises."""
    done: dict[str, U | Result] = {}
    for name, item in items.items():
        if isinstance(item, Result):
            done[name] = item
            continue
        try:
            done[name] = step(item)
        except Exception as error:  # noqa: BLE001  # the error of a peer is shown in the table
            done[name] = Result(trouble=describe(error))
    return done


def interleave(runners: Mapping[str, Runner | Result], rounds: int) -> dict[str, Result]:
    """Sample every runner once per round, without garbage collection; return the results by name."""
    results = {name: runner if isinstance(runner, Result) else Result() for name, runner in runners.items()}
    names = list(runners)
    with no_collections():
        for round_number in range(rounds):
            first = round_number % len(names)
            for name in names[first:] + names[:first]:
                runner, result = runners[name], results[name]
                if isinstance(runner, Result) or result.trouble:
                    continue
                try:
                    result.samples.append(runner())
                except Exception as error:  # noqa: BLE001  # as in each
                    result.samples.clear()
                    result.trouble = describe(error)
    return results


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Disable the garbage collector within a block."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process and its children have used."""
    used = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if pid in (int(path.parent.name), int(fields[1])):
                used += int(fields[11]) + int(fields[12])
    return used / os.sysconf("SC_CLK_TCK")


def number(value: float, digits: int = 0) -> str:
    """Return a number for a table; a dash for NaN."""
    return "-" if value != value else f"{value:,.{digits}f}"


def table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned table: the first column left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        rest = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        return "  ".join([cells[0].ljust(widths[0]), *rest]).rstrip()

    rule = "  ".join("─" * width for width in widths)
    return "\n".join(["", title, line(headers), rule, *(line(row) for row in rows)])


def notes(*results: Mapping[str, Result]) -> list[str]:
    """Return the lines below a table: the reasons of missing contenders, without repetitions."""
    reasons = {
        f"{name}: {found.trouble}" for row in results for name, found in row.items() if ":" in found.trouble
    }
    return ["", *sorted(reasons)] if reasons else []


def _target_table(targets: Sequence[Target]) -> str:
    rows = [
        [
            target.name,
            f"{'≤' if target.at_most else '≥'} {target.bound:g}",
            number(target.measured, 2),
            target.verdict,
            target.where,
        ]
        for target in targets
    ]
    return table("Targets (the worst case counts)", ["target", "bound", "worst", "", "where"], rows)


def write_json(name: str, content: Mapping[str, Any]) -> Path:
    """Write the results of a run, and return the path of the file."""
    path = RESULTS / f"{name}.json"
    machine = {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
    }
    text = json.dumps({"machine": machine, **content}, indent=1, ensure_ascii=False, default=vars)
    path.write_text(text.replace("NaN", "null") + "\n", encoding="utf-8")
    return path
