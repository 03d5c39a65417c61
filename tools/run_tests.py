"""Run the test suites, as many at a time as there are processors, and say what each took.

Every folder under tests/ that holds tests is a suite, so none can be forgotten. What proves the core runs under branch
coverage, and too little of it counts as one failure. A suite that finds no tests, or that breaks off, has failed.

Coverage sees plain Python only, so those tests run on the uncompiled core. What holds the core to its reference runs once
more on the compiled one, where there is one; all other suites run on it anyway.

    python tools/run_tests.py                 everything
    python tools/run_tests.py unit docs       only these, without the coverage bar

TEST_JOBS=1 runs one suite at a time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
ORDER = ("conformance", "integration", "unit", "faults", "apps", "server", "demo", "browser", "docs")
"""Long ones first, so that no processor is idle in the end."""
MEASURED = ("unit", "conformance")
REMOTE = ("redis", "postgres", "client")
"""In the names of conformance tests whose stores coverage leaves out; it would only slow them down."""
UNMEASURED = "unit/remote/test_threads.py"
"""It has a test that interrupts, which does not go together with coverage; so it runs once more without."""
CORE_TESTS = (
    *(f"conformance/test_{name}.py" for name in ("memory", "async_memory", "vectors", "model", "kit")),
    *(
        f"unit/test_{name}.py"
        for name in ("memory", "promises", "races", "refunds", "decision", "limiter", "hold")
    ),
    *(f"unit/test_{name}.py" for name in ("awaiting", "wait", "guard", "build")),
)
"""What runs on both builds of the core."""

BUDGET_SECONDS = 420


class Job(NamedTuple):
    """Tests that run in one process."""

    suite: str
    paths: list[Path]
    is_measured: bool = False


class Outcome(NamedTuple):
    """What became of one job."""

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
    run_coverage("erase")
    start = time.monotonic()
    jobs = [job for name in wanted or find_suites() for job in jobs_of(name)]
    if not wanted and is_compiled():
        jobs.append(Job("compiled core", [TESTS / path for path in CORE_TESTS]))
    outcomes = run_jobs(jobs)
    if not wanted:
        outcomes.append(check_coverage())
    print_table(outcomes, time.monotonic() - start)
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def find_suites() -> list[str]:
    """Return the folders under tests/ that hold tests: the known ones in order, then any others."""
    found = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    return [name for name in ORDER if name in found] + sorted(found.difference(ORDER))


def is_compiled() -> bool:
    """Return whether there is a compiled core."""
    ask = "import sys, headgate._build; sys.exit(not headgate._build.is_compiled())"
    return subprocess.run([sys.executable, "-c", ask], cwd=ROOT, check=False).returncode == 0


def jobs_of(suite: str) -> list[Job]:
    """Return what runs a suite: at once, or what is measured apart from what is not."""
    folder = TESTS / suite
    if suite != "conformance":
        return [Job(suite, [folder], suite in MEASURED)]
    files = sorted(folder.glob("test_*.py"))
    remote = [path for path in files if any(word in path.name for word in REMOTE)]
    half = len(remote) // 2
    return [
        Job("conformance 1", [*remote[:half], TESTS / UNMEASURED]),
        Job("conformance 2", remote[half:]),
        Job("conformance 3", [path for path in files if path not in remote], is_measured=True),
    ]


def run_jobs(jobs: list[Job]) -> list[Outcome]:
    """Run the jobs, the first ones first; the output of each is shown when it has ended."""
    at_once = int(os.environ.get("TEST_JOBS", os.cpu_count() or 1))
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(run_job, jobs))


def run_job(job: Job) -> Outcome:
    """Run one job and count its tests."""
    print(f"=== {job.suite}: started", flush=True)
    measure = ["-m", "coverage", "run", "--parallel-mode"] if job.is_measured else []
    environment = os.environ | ({"HEADGATE_PURE": "1"} if measure else {})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [
            sys.executable,
            *measure,
            "-m",
            "pytest",
            "-q",
            *map(str, job.paths),
            f"--junit-xml={report}",
        ]
        start = time.monotonic()
        run = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        seconds = time.monotonic() - start
        passed, failed, skipped = read_report(report)
    if run.returncode and not failed:  # broken off, or no tests at all (pytest's exit code 5)
        failed = 1
    print(f"=== {job.suite}: ended after {seconds:.0f} s\n{run.stdout.decode(errors='replace')}", flush=True)
    return Outcome(job.suite, seconds, passed, failed, skipped)


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
    print("=== coverage of the core", flush=True)
    start = time.monotonic()
    code = run_coverage("combine", "--quiet") or run_coverage("report")
    return Outcome("coverage", time.monotonic() - start, failed=int(code != 0))


def run_coverage(*args: str) -> int:
    """Run a command of coverage and return its exit code."""
    return subprocess.run([sys.executable, "-m", "coverage", *args], cwd=ROOT, check=False).returncode


def print_table(outcomes: list[Outcome], total: float) -> None:
    """Print one row per job, the total against the budget, and the closing line."""
    row = "{:<16}{:>10}{:>10}{:>10}{:>10}".format
    print("\n" + row("suite", "seconds", "passed", "failed", "skipped"))
    for outcome in outcomes:
        counts = (outcome.passed, outcome.failed, outcome.skipped)
        print(row(outcome.suite, f"{outcome.seconds:.1f}", *counts))
    verdict = "within" if total <= BUDGET_SECONDS else "OVER"
    print(f"{total:.1f} s in all, {verdict} the budget of {BUDGET_SECONDS} s\n")
    passed = sum(outcome.passed for outcome in outcomes)
    failed = sum(outcome.failed for outcome in outcomes)
    print(f"{passed} passed, {failed} failed")


if __name__ == "__main__":
    sys.exit(main())
