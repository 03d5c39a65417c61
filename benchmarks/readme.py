"""`python -m benchmarks.readme`: write the figures of README.md from the results of the last full runs.

It measures nothing. README.md has the figures between two comments; a test compares them with the results.
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

README = Path(__file__).resolve().parent.parent / "README.md"
MARKED = re.compile(r"(?<=<!-- figures -->\n).*?(?=<!-- end of figures -->)", re.DOTALL)
COLUMNS = (HEADGATE, PLAIN, "limits", "slowapi", "throttled-py", "pyrate-limiter")


def read(name: str) -> dict[str, Any]:
    """Return the results of a run."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def medians(results: Mapping[str, Any], suffix: str = "") -> dict[str, float]:
    """Return the medians of the contenders that were measured, by name without the suffix."""
    return {
        name.removesuffix(suffix): statistics.median(result["samples"])
        for name, result in results.items()
        if result["samples"] and name.endswith(suffix)
    }


def rows() -> dict[str, tuple[dict[str, float], Callable[[float], str]]]:
    """Return the rows of the table, and how their numbers are written."""
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


def with_figures(readme: str) -> str:
    """Return the text of README.md with the figures of the results."""
    return MARKED.sub(table().replace("\\", r"\\"), readme)


def main() -> None:
    """Write the figures."""
    README.write_text(with_figures(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
