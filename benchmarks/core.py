"""`python -m benchmarks.core [--quick]`: decisions in memory and SQLite, beside two floors and the other limiters."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from types import ModuleType

from benchmarks import footprint, logs, overshoot, speed, sqlite, stalls, threads
from benchmarks.contenders import HEADGATE
from benchmarks.harness import FULL, QUICK, Progress, Section, target_table, write_chart, write_json

SUBJECTS = (speed, threads, logs, footprint, stalls, overshoot, sqlite)


def main() -> None:
    """Measure every subject, print its tables, then the targets; write JSON and a chart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a rough look: fewer keys, calls and rounds")
    parser.add_argument("--only", choices=[_name(subject) for subject in SUBJECTS], help="one subject")
    parser.add_argument("--shape", default="", help="of speed, only shapes with this in their name")
    options = parser.parse_args()
    only = "speed" if options.shape else options.only
    subjects = [subject for subject in SUBJECTS if only in (None, _name(subject))]
    scale = replace(QUICK if options.quick else FULL, only=options.shape)
    progress = Progress(sum(subject.STEPS for subject in subjects))
    sections: list[Section] = []
    for subject in subjects:
        for section in subject.run(scale, progress):
            progress.end()
            print(*section.tables, sep="\n", flush=True)
            sections.append(section)
    _finish(
        sections,
        "core" if subjects == list(SUBJECTS) and not options.quick else "core-partial",
        options.quick,
    )


def _finish(sections: list[Section], name: str, quick: bool) -> None:
    targets = [target for section in sections for target in section.targets]
    panels = [panel for section in sections for panel in section.panels]
    warning = "; a quick look with a tenth of the keys decides nothing" if quick else ""
    print(target_table(targets, f"Targets (the worst case counts{warning})"))
    data = {section.name: section.data for section in sections}
    written = write_json(name, {**data, "targets": targets})
    chart = write_chart(name, "Headgate beside other Python limiters (less is better)", panels, HEADGATE)
    print(f"\n{written}\n{chart}", file=sys.stderr)


def _name(subject: ModuleType) -> str:
    return subject.__name__.rpartition(".")[2]


if __name__ == "__main__":
    main()
