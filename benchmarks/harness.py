"""What every benchmark shares: interleaved rounds, medians, tables, targets, JSON and a chart.

How to think about it:

* A *runner* is a function without arguments that takes one sample and returns one number. `interleave` asks every
  runner once per round, and starts each round with another one, so that a slow spell of the machine hits all alike.
* Numbers are compared as the median of the ratios within each round, for the same reason.
* A runner that cannot run is a result too: it stays in the table with its reason.
* CPU time of the calling thread is the measure of a decision: other processes do not disturb it, and clean-up threads
  of a contender are not charged to anybody.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from xml.sax.saxutils import escape

RESULTS = Path(__file__).parent / "results"

Runner = Callable[[], float]
T = TypeVar("T")
U = TypeVar("U")


class NotOfferedError(Exception):
    """The contender has nothing that answers this question."""


@dataclass
class Result:
    """The samples of one contender, or why there are none."""

    samples: list[float] = field(default_factory=list)
    trouble: str = ""

    @property
    def median(self) -> float:
        """The middle sample; not a number if there is none."""
        return statistics.median(self.samples) if self.samples else float("nan")

    @property
    def cell(self) -> str:
        """The median for a table, or the first word of the trouble; `notes` has the rest."""
        return self.trouble.partition(":")[0] or number(self.median)

    def times(self, other: Result) -> float:
        """Return how many times the other's cost this one has, as the median over the rounds."""
        if not (self.samples and other.samples):
            return float("nan")
        return statistics.median(
            mine / theirs for mine, theirs in zip(self.samples, other.samples, strict=True)
        )


@dataclass(frozen=True)
class Target:
    """A bound that was promised, and the worst that was measured."""

    name: str
    bound: float
    measured: float
    at_most: bool
    where: str = ""

    @property
    def reached(self) -> bool:
        """Whether the promise is kept; a missing measurement keeps none."""
        return self.measured <= self.bound if self.at_most else self.measured >= self.bound

    @property
    def verdict(self) -> str:
        """The same in words."""
        if self.measured != self.measured:
            return "not measured"
        return "reached" if self.reached else "NOT REACHED"


def worst_of(name: str, bound: float, ratios: Mapping[Any, float], at_most: bool) -> Target:
    """Return the target judged by its worst case; with a case missing it is not measured, rather than easier."""
    missing = [case for case, ratio in ratios.items() if ratio != ratio]
    if missing:
        return Target(name, bound, float("nan"), at_most, f"missing: {len(missing)}, as {missing[0]}")
    where = (max if at_most else min)(ratios, key=lambda case: ratios[case])
    return Target(name, bound, ratios[where], at_most, str(where))


class Progress:
    """One line on standard error that says what is being measured; a line per step if nobody watches."""

    def __init__(self, steps: int) -> None:
        self.steps, self.step, self.title = steps, 0, ""
        self.started = time.monotonic()
        self.live = sys.stderr.isatty()

    def begin(self, title: str) -> None:
        """Start the next step."""
        self.step, self.title = self.step + 1, title
        self._write("" if self.live else "\n")

    def show(self, detail: str) -> None:
        """Say what is happening within the step."""
        if self.live:
            self._write("", f" · {detail}")

    def end(self) -> None:
        """Leave the line."""
        print("\r\033[K" if self.live else "", end="", file=sys.stderr, flush=True)

    def _write(self, end: str, detail: str = "") -> None:
        elapsed = time.monotonic() - self.started
        line = f"[{self.step}/{self.steps} {elapsed:4.0f}s] {self.title}{detail}"
        print(f"\r\033[K{line}" if self.live else line, end=end, file=sys.stderr, flush=True)


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
    """Take one step with every item; one that raises becomes the result that says why."""
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


def interleave(runners: Mapping[str, Runner | Result], rounds: int, progress: Progress) -> dict[str, Result]:
    """Sample every runner once per round, the garbage collector off, and return the results by name."""
    results = {name: runner if isinstance(runner, Result) else Result() for name, runner in runners.items()}
    names = list(runners)
    with no_collections():
        for number in range(rounds):
            progress.show(f"round {number + 1} of {rounds}")
            first = number % len(names)
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
    """Keep the garbage collector out, for every contender alike."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def time_calls(hit: Callable[[Any], Any], keys: Sequence[Any]) -> float:
    """Return CPU nanoseconds per call."""
    start = time.thread_time_ns()
    for key in keys:
        hit(key)
    return (time.thread_time_ns() - start) / len(keys)


async def time_awaits(hit: Callable[[Any], Awaitable[Any]], keys: Sequence[Any]) -> float:
    """Return CPU nanoseconds per awaited call."""
    start = time.thread_time_ns()
    for key in keys:
        await hit(key)
    return (time.thread_time_ns() - start) / len(keys)


def time_tiered_calls(hit: Callable[..., Any], keys: Sequence[Any], tier: str) -> float:
    """Return CPU nanoseconds per call that names a tier."""
    start = time.thread_time_ns()
    for key in keys:
        hit(key, tier=tier)
    return (time.thread_time_ns() - start) / len(keys)


def time_holds(hold: Callable[[Any], Any], keys: Sequence[Any]) -> float:
    """Return CPU nanoseconds per hold that is released at once."""
    start = time.thread_time_ns()
    for key in keys:
        hold(key).release()
    return (time.thread_time_ns() - start) / len(keys)


def number(value: float, digits: int = 0) -> str:
    """Return a number for a table, a dash if there is none."""
    return "-" if value != value else f"{value:,.{digits}f}"


def table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned table: the first column to the left, the rest to the right."""
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        rest = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        return "  ".join([cells[0].ljust(widths[0]), *rest]).rstrip()

    rule = "  ".join("─" * width for width in widths)
    return "\n".join(["", title, line(headers), rule, *(line(row) for row in rows)])


def notes(results: Iterable[Mapping[str, Result]]) -> list[str]:
    """Return what stands below a table: why contenders are missing in it, each reason once."""
    reasons = {
        f"{name}: {found.trouble}" for row in results for name, found in row.items() if ":" in found.trouble
    }
    return ["", *sorted(reasons)] if reasons else []


def target_table(targets: Sequence[Target], title: str) -> str:
    """Return the table of promises, the worst measurement beside each."""
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
    return table(title, ["target", "bound", "worst", "", "where"], rows)


def machine() -> dict[str, str]:
    """Return what the numbers were measured on."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), model)
    return {"python": platform.python_version(), "system": platform.system(), "processor": model}


def write_json(name: str, content: Mapping[str, Any]) -> Path:
    """Write the results of a run and return where."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    plain = json.dumps({"machine": machine(), **content}, indent=1, ensure_ascii=False, default=vars)
    path.write_text(plain.replace("NaN", "null") + "\n")
    return path


@dataclass(frozen=True)
class Scale:
    """How much work a run does."""

    rounds: int
    calls: int
    """Calls per sample."""
    keys: int
    """What "many keys" means."""
    only: str = ""
    """Only shapes with this in their name."""


FULL = Scale(rounds=9, calls=10_000, keys=100_000)
QUICK = Scale(rounds=3, calls=2_000, keys=10_000)


@dataclass
class Section:
    """What one subject has to say."""

    name: str
    tables: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)


@dataclass(frozen=True)
class Panel:
    """One group of bars of a chart; a bar that is not a number shows its note alone."""

    title: str
    unit: str
    bars: Sequence[tuple[str, float, str]]
    """Label, value, note."""


def write_chart(name: str, title: str, panels: Sequence[Panel], ours: str) -> Path:
    """Write horizontal bars as SVG, ours in colour, and return where."""
    RESULTS.mkdir(exist_ok=True)
    body: list[str] = []
    y = 58
    for panel in panels:
        body.append(f'<text x="24" y="{y}" class="panel">{escape(panel.title)}</text>')
        y += 12
        longest = max((value for _, value, _ in panel.bars if value == value), default=1.0)
        for label, value, note in panel.bars:
            body.extend(_bar(y, label, value, f"{note} {panel.unit}".strip(), longest, ours))
            y += 22
        y += 34
    path = RESULTS / f"{name}.svg"
    path.write_text(_SVG.format(height=y - 10, title=escape(title), body="\n".join(body)))
    return path


def _bar(y: int, label: str, value: float, note: str, longest: float, ours: str) -> Iterator[str]:
    mine = ' class="ours"' if label.startswith(ours) else ""
    known = value == value
    width = max(2.0, 430 * value / longest) if known else 0
    yield f'<text x="220" y="{y + 13}" text-anchor="end"{mine}>{escape(label)}</text>'
    if known:
        yield f'<rect x="230" y="{y + 2}" width="{width:.1f}" height="15" rx="3"{mine}/>'
    yield f'<text x="{238 + width:.1f}" y="{y + 13}" class="value">{escape(note)}</text>'


_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {height}" width="800" height="{height}" role="img">
<title>{title}</title>
<style>
text {{ font: 13px system-ui, sans-serif; fill: #333 }}
.title {{ font-size: 17px; font-weight: 600 }} .panel {{ font-weight: 600 }}
.value {{ font-size: 12px; fill: #666 }} text.ours {{ font-weight: 600; fill: #0b6e4f }}
rect {{ fill: #b8c2cc }} rect.ours {{ fill: #12a06f }} rect.paper {{ fill: #fff }}
</style>
<rect class="paper" width="100%" height="100%"/>
<text x="24" y="28" class="title">{title}</text>
{body}
</svg>
"""


@dataclass(frozen=True)
class Plot:
    """Curves over a common axis, both axes logarithmic."""

    title: str
    x: str
    y: str
    series: Mapping[str, Sequence[tuple[float, float]]]


COLOURS = ("#12a06f", "#2f6fbf", "#c2571a", "#7a4fb5")
LEFT, RIGHT, PLOT_HEIGHT = 90, 620, 190


def write_plots(name: str, title: str, plots: Sequence[Plot]) -> Path:
    """Write curves as SVG, and return where."""
    RESULTS.mkdir(exist_ok=True)
    body: list[str] = []
    y = 58
    for plot in plots:
        body.extend(_plot(y, plot))
        y += PLOT_HEIGHT + 90
    path = RESULTS / f"{name}.svg"
    path.write_text(_SVG.format(height=y - 20, title=escape(title), body="\n".join(body)))
    return path


def _plot(top: int, plot: Plot) -> Iterator[str]:
    points = [point for line in plot.series.values() for point in line]
    lowest, highest = (edge(math.log10(y) for _, y in points) for edge in (min, max))
    first, last = (edge(math.log10(x) for x, _ in points) for edge in (min, max))
    low, high = math.floor(lowest), math.ceil(highest)
    bottom = top + 12 + PLOT_HEIGHT

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (RIGHT - LEFT) * (math.log10(x) - first) / (last - first)
        return across, bottom - PLOT_HEIGHT * (math.log10(y) - low) / (high - low)

    yield f'<text x="24" y="{top}" class="panel">{escape(plot.title)}: {escape(plot.y)}</text>'
    for power in range(low, high + 1):
        _, y = place(10**first, 10**power)
        yield f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" class="value">{10.0**power:g}</text>'
    for x in sorted({x for x, _ in points}):
        across, _ = place(x, 10**low)
        yield f'<text x="{across:.1f}" y="{bottom + 18}" text-anchor="middle" class="value">{x:,.0f}</text>'
    yield f'<text x="{RIGHT}" y="{bottom + 36}" text-anchor="end" class="value">{escape(plot.x)}</text>'
    labels = []
    for (label, line), colour in zip(plot.series.items(), COLOURS, strict=False):
        at = [place(x, y) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in at)
        labels.append((at[-1][1] + 4, f"{label} {line[-1][1]:.3g}", colour))
    lower = 0.0
    for y, text, colour in sorted(labels):
        lower = max(y, lower + 15)  # so that none is over another
        yield f'<text x="{RIGHT + 10}" y="{lower:.1f}" style="fill:{colour}">{escape(text)}</text>'
