"""`python -m benchmarks.readme`: write the figures of README.md, and its chart, from the results of the last full runs.

It measures nothing. README.md has the figures between two comments; a test compares them with the results.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.contenders import HEADGATE, PLAIN
from benchmarks.harness import RESULTS, Panel, number, write_chart

README = Path(__file__).resolve().parent.parent / "README.md"
MARKED = re.compile(r"(?<=<!-- figures -->\n).*?(?=<!-- end of figures -->)", re.DOTALL)
COLUMNS = (HEADGATE, PLAIN, "limits", "slowapi", "throttled-py", "pyrate-limiter")
NOT_OFFERED = "-"

Figures = dict[str, float]
"""A number for each contender that has one."""


def read(name: str) -> dict[str, Any]:
    """Return the results of a run."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def medians(results: Mapping[str, Any], suffix: str = "") -> Figures:
    """Return the medians of those that were measured, without what their names end with."""
    return {
        name.removesuffix(suffix): statistics.median(result["samples"])
        for name, result in results.items()
        if result["samples"] and name.endswith(suffix)
    }


def added(results: Mapping[str, Any]) -> Figures:
    """Return what a limit adds to a request: the medians of the differences within each round, in microseconds."""
    bare = results["no limit"]["samples"]
    return {
        name: statistics.median(mine - without for mine, without in zip(result["samples"], bare, strict=True))
        for name, result in results.items()
        if result["samples"]
    }


def rows() -> dict[str, tuple[Figures, Callable[[float], str]]]:
    """Return what is compared, and how its numbers are written."""
    core, http = read("core"), read("http")
    decisions = core["decisions"]
    return {
        "One sliding window in memory, CPU time": (
            medians(decisions["sliding_window, 1 key"]),
            lambda ns: f"{ns / 1000:.2f} µs",
        ),
        "Two sliding windows in memory, CPU time": (
            medians(decisions["two sliding_windows, 1 key"]),
            lambda ns: f"{ns / 1000:.2f} µs",
        ),
        "Memory for a key of a sliding window": (
            medians(core["bytes per key"]["sliding_window"]),
            lambda size: f"{number(size)} B",
        ),
        "Most admitted within one period by a sliding window": (
            medians(core["rolling window"], ": sliding_window"),
            lambda ratio: f"{ratio:.2f} times the limit",
        ),
        "What a limit adds to a FastAPI request": (
            added(http["FastAPI"]["admitted"]),
            lambda us: f"{us:.0f} µs",
        ),
    }


def table() -> str:
    """Return the comparison in Markdown."""
    lines = [f"| | {' | '.join(COLUMNS)} |", "| --- |" + " --- |" * len(COLUMNS)]
    for title, (figures, write) in rows().items():
        cells = [write(figures[name]) if name in figures else NOT_OFFERED for name in COLUMNS]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_figures(readme: str) -> str:
    """Return the text of README.md with the figures of the results."""
    return MARKED.sub(table().replace("\\", r"\\"), readme)


def panels() -> list[Panel]:
    """Return the bars of the chart: CPU time of one decision and of two rules together."""
    names = [name for name in COLUMNS if name != "slowapi"]  # it counts with limits
    chosen = list(rows().items())[:2]
    return [
        Panel(title, "", [(name, figures[name], write(figures[name])) for name in names if name in figures])
        for title, (figures, write) in chosen
    ]


def main() -> None:
    """Write both."""
    README.write_text(with_figures(README.read_text(encoding="utf-8")), encoding="utf-8")
    write_chart("readme", "CPU time of a decision in memory (less is better)", panels(), HEADGATE)


if __name__ == "__main__":
    main()
