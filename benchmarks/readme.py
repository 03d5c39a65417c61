"""`python -m benchmarks.readme`: write the figures of README.md and docs/scale.md from the results of the last full runs.

It measures nothing. Each page contains the figures between two comments: README.md as one sentence, docs/scale.md as a
table. A test compares them with the results.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.contenders import PLAIN
from benchmarks.harness import HEADGATE, RESULTS, number

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
SCALE = ROOT / "docs" / "scale.md"
MARKED = re.compile(r"(?<=<!-- figures -->\n).*?(?=<!-- end of figures -->)", re.DOTALL)
COLUMNS = (HEADGATE, PLAIN, "limits", "slowapi", "throttled-py", "pyrate-limiter")


def read(name: str) -> dict[str, Any]:
    """Return the results of a run."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def medians(results: Mapping[str, Any], suffix: str = "") -> dict[str, float]:
    """Return the medians of the measured contenders, by name without the suffix."""
    return {
        name.removesuffix(suffix): statistics.median(result["samples"])
        for name, result in results.items()
        if result["samples"] and name.endswith(suffix)
    }


def rows() -> dict[str, tuple[dict[str, float], Callable[[float], str]]]:
    """Return the rows of the table, each with the function that formats its numbers."""
    memory, http = read("memory"), read("http")
    decisions = memory["decisions"]
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
            medians(memory["bytes per key"]["sliding_window"]),
            lambda size: f"{number(size)} B",
        ),
        "Most admitted within one period by a sliding window": (
            medians(memory["rolling window"], ": sliding_window"),
            lambda ratio: f"{ratio:.2f} times the limit",
        ),
        "What a limit adds to a FastAPI request": (
            medians(http["FastAPI"]["admitted"]),
            lambda us: f"{us:.0f} µs",
        ),
    }


def table() -> str:
    """Return the comparison in Markdown."""
    lines = [f"| | {' | '.join(COLUMNS)} |", "| --- |" + " --- |" * len(COLUMNS)]
    for title, (figures, write) in rows().items():
        cells = [write(figures[name]) if name in figures else "-" for name in COLUMNS]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def sentence() -> str:
    """Return the figures of one decision as a sentence."""
    figures, write = next(iter(rows().values()))
    times = {name: write(figures[name]) for name in COLUMNS if name in figures}
    others = ", ".join(f"{name} {time}" for name, time in times.items() if name not in (HEADGATE, PLAIN))
    return (
        f"One sliding window in memory takes {times[HEADGATE]} of CPU time compiled and {times[PLAIN]} in plain Python; "
        f"{others} ([how it is measured](benchmarks/README.md)).\n"
    )


def with_figures(page: Path) -> str:
    """Return the text of a page with the figures of the results."""
    figures = sentence() if page == README else table()
    return MARKED.sub(figures.replace("\\", r"\\"), page.read_text(encoding="utf-8"))


def main() -> None:
    """Write the figures."""
    for page in (README, SCALE):
        page.write_text(with_figures(page), encoding="utf-8")


if __name__ == "__main__":
    main()
