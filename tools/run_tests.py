"""Run the test suites one after the other and say what each took.

Every folder under tests/ that holds tests is a suite, so none can be forgotten. The suites of the core run under branch
coverage, and too little of it counts as one failure. A suite that finds no tests, or that breaks off, has failed.

Coverage sees plain Python only, so those suites run on the uncompiled core. What holds the core to its reference runs once
more on the compiled one, where there is one; all other suites run on it anyway.

    python tools/run_tests.py                 everything
    python tools/run_tests.py unit docs       only these, without the coverage bar
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
ORDER = ("unit", "conformance", "integration", "apps", "server", "demo", "browser", "docs")
MEASURED = ("unit", "conformance")
CORE_TESTS = (
    *(f"conformance/test_{name}.py" for name in ("memory", "async_memory", "vectors", "model", "kit")),
    *(
        f"unit/test_{name}.py"
        for name in ("memory", "promises", "races", "refunds", "decision", "limiter", "hold")
    ),
    *(f"unit/test_{name}.py" for name in ("awaiting", "wait", "guard", "build")),
)
"""What runs on both builds of the core."""

BUDGET_SECONDS = 600


class Outcome(NamedTuple):
    """What became of one suite."""

    suite: str
    seconds: float
    passed: int = 0
    failed: int = 0
    skipped: int = 0


def main() -> int:
    """Run the suites named on the command line, or all of them; return the exit code."""
    parser = argparse.ArgumentParser(description="Run the test suites and say what each took.")
    parser.add_argument("suites", nargs="*", metavar="suite", help="folders under tests/; default: all")
    wanted = parser.parse_args().suites
    subprocess.run([sys.executable, "-m", "coverage", "erase"], cwd=ROOT, check=True)
    outcomes = [run_suite(name, [name]) for name in wanted or find_suites()]
    if not wanted:
        outcomes.append(check_coverage())
        if is_compiled():
            outcomes.append(run_suite("compiled core", CORE_TESTS))
        else:
            print("\nThe core is not compiled here, so it was tested as plain Python only.")
    print_table(outcomes)
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def find_suites() -> list[str]:
    """Return the folders under tests/ that hold tests: the known ones in order, then any others."""
    found = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    return [name for name in ORDER if name in found] + sorted(found.difference(ORDER))


def is_compiled() -> bool:
    """Return whether there is a compiled core."""
    ask = "import sys, headgate._build; sys.exit(not headgate._build.is_compiled())"
    return subprocess.run([sys.executable, "-c", ask], cwd=ROOT, check=False).returncode == 0


def run_suite(name: str, paths: Iterable[str]) -> Outcome:
    """Run one suite and count its tests."""
    print(f"\n=== {name} ===", flush=True)
    measure = ["-m", "coverage", "run", "--append"] if name in MEASURED else []
    environment = os.environ | ({"HEADGATE_PURE": "1"} if measure else {})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [
            sys.executable,
            *measure,
            "-m",
            "pytest",
            "-q",
            *(str(TESTS / path) for path in paths),
            f"--junit-xml={report}",
        ]
        start = time.monotonic()
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        seconds = time.monotonic() - start
        passed, failed, skipped = read_report(report)
    if code and not failed:  # broken off, or no tests at all (pytest's exit code 5)
        failed = 1
    return Outcome(name, seconds, passed, failed, skipped)


def read_report(report: Path) -> tuple[int, int, int]:
    """Return how many tests passed, failed and were skipped, from a JUnit file; zeros if there is none."""
    if not report.exists():
        return 0, 0, 0
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    counts = [
        [int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")] for suite in suites
    ]
    tests, failures, errors, skipped = (sum(column) for column in zip(*counts, strict=True))
    failed = failures + errors
    return max(tests - failed - skipped, 0), failed, skipped


def check_coverage() -> Outcome:
    """Report the branch coverage of the core; below the bar of pyproject.toml is a failure."""
    print("\n=== coverage of the core ===", flush=True)
    start = time.monotonic()
    code = subprocess.run([sys.executable, "-m", "coverage", "report"], cwd=ROOT, check=False).returncode
    return Outcome("coverage", time.monotonic() - start, failed=int(code != 0))


def print_table(outcomes: list[Outcome]) -> None:
    """Print one row per suite, the total against the budget, and the closing line."""
    row = "{:<14}{:>10}{:>10}{:>10}{:>10}".format
    print("\n" + row("suite", "seconds", "passed", "failed", "skipped"))
    for outcome in outcomes:
        counts = (outcome.passed, outcome.failed, outcome.skipped)
        print(row(outcome.suite, f"{outcome.seconds:.1f}", *counts))
    total = sum(outcome.seconds for outcome in outcomes)
    verdict = "within" if total <= BUDGET_SECONDS else "OVER"
    print(f"{total:.1f} s in all, {verdict} the budget of {BUDGET_SECONDS} s\n")
    passed = sum(outcome.passed for outcome in outcomes)
    failed = sum(outcome.failed for outcome in outcomes)
    print(f"{passed} passed, {failed} failed")


if __name__ == "__main__":
    sys.exit(main())
