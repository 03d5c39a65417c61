"""What every benchmark shares: interleaved rounds, medians, tables, targets and JSON.

How to think about it:

* A *runner* is a function without arguments that takes one sample and returns one number. `interleave` calls every
  runner once per round, and starts each round with another one, so that a slow period of the machine affects all alike.
* Numbers are compared as the median of the ratios within each round, for the same reason.
* A runner that cannot run is a result too: it stays in the table with its reason.
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
    """The contender has nothing that answers this question."""


@dataclass
class Result:
    """The samples of one contender, or the reason why they are missing."""

    samples: list[float] = field(default_factory=list)
    trouble: str = ""

    @property
    def median(self) -> float:
        """The middle sample; not a number without samples."""
        return statistics.median(self.samples) if self.samples else float("nan")

    @property
    def cell(self) -> str:
        """The median for a table, or the first word of the trouble; `notes` has the rest."""
        return self.trouble.partition(":")[0] or number(self.median)

    def times(self, other: Result) -> float:
        """Return this one's number divided by the other's, as the median over the rounds."""
        if not (self.samples and other.samples):
            return float("nan")
        return statistics.median(
            mine / theirs for mine, theirs in zip(self.samples, other.samples, strict=True)
        )

    def over(self, base: Result) -> Result:
        """Return the difference to another one in each round."""
        if self.trouble or not base.samples:
            return self
        return Result([mine - its for mine, its in zip(self.samples, base.samples, strict=True)])


@dataclass(frozen=True)
class Target:
    """A bound, and the worst that was measured."""

    name: str
    bound: float
    measured: float
    at_most: bool
    where: str = ""

    @property
    def verdict(self) -> str:
        """Whether the bound holds, in words; a missing measurement does not count as reached."""
        if self.measured != self.measured:
            return "not measured"
        reached = self.measured <= self.bound if self.at_most else self.measured >= self.bound
        return "reached" if reached else "NOT REACHED"


def worst_of(name: str, bound: float, ratios: Mapping[str, float], at_most: bool) -> Target:
    """Return the target judged by its worst case; if a case is missing, it is not measured."""
    missing = [case for case, ratio in ratios.items() if ratio != ratio]
    if missing:
        return Target(name, bound, float("nan"), at_most, f"missing: {missing[0]}")
    where = (max if at_most else min)(ratios, key=lambda case: ratios[case])
    return Target(name, bound, ratios[where], at_most, where)


@dataclass(frozen=True)
class Scale:
    """How much work a run does."""

    rounds: int
    calls: int
    """Calls per sample."""
    keys: int
    """What "many keys" means."""


FULL = Scale(rounds=9, calls=10_000, keys=100_000)
QUICK = Scale(rounds=3, calls=2_000, keys=10_000)


@dataclass
class Section:
    """The outcome of one question."""

    name: str
    tables: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)


def main(name: str, description: str | None, run: Callable[[Scale], Iterable[Section]]) -> None:
    """Run a module from the command line: print its tables and targets, write its results as JSON."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a rough look: fewer keys, calls and rounds")
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
    """Return why a contender is missing, in a few words."""
    match error:
        case NotOfferedError():
            return str(error) or "not offered"
        case ImportError():
            return f"not installed: {error.name or error}"
        case _:
            return f"failed: {type(error).__name__}: {error}"


def each(items: Mapping[str, T | Result], step: Callable[[T], U]) -> dict[str, U | Result]:
    """Call a function with every item; an exception becomes the result with the reason."""
    done: dict[str, U | Result] = {}
    for name, item in items.items():
        if isinstance(item, Result):
            done[name] = item
            continue
        try:
            done[name] = step(item)
        except Exception as error:  # noqa: BLE001  # whatever a peer raises is its result, shown in the table
            done[name] = Result(trouble=describe(error))
    return done


def interleave(runners: Mapping[str, Runner | Result], rounds: int) -> dict[str, Result]:
    """Sample every runner once per round, the garbage collector off, and return the results by name."""
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
    """Switch the garbage collector off, for every contender alike."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its children up to now."""
    used = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if pid in (int(path.parent.name), int(fields[1])):
                used += int(fields[11]) + int(fields[12])
    return used / os.sysconf("SC_CLK_TCK")


def number(value: float, digits: int = 0) -> str:
    """Return a number for a table, a dash for not a number."""
    return "-" if value != value else f"{value:,.{digits}f}"


def table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned table: the first column to the left, the rest to the right."""
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        rest = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        return "  ".join([cells[0].ljust(widths[0]), *rest]).rstrip()

    rule = "  ".join("─" * width for width in widths)
    return "\n".join(["", title, line(headers), rule, *(line(row) for row in rows)])


def notes(*results: Mapping[str, Result]) -> list[str]:
    """Return the lines below a table: why contenders are missing in it, each reason once."""
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
    """Write the results of a run and return where."""
    path = RESULTS / f"{name}.json"
    machine = {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
    }
    text = json.dumps({"machine": machine, **content}, indent=1, ensure_ascii=False, default=vars)
    path.write_text(text.replace("NaN", "null") + "\n", encoding="utf-8")
    return path
