"""Run the test suites, several at a time, and print the time of each.

Every folder under tests/ with tests is a suite. A suite without tests, or one that aborts, counts as failed. `make check`
runs at the same time.

The suites use the installed core, which is compiled if there is a compiler. Tests of the core run a second time on plain
Python, with fewer random examples and under branch coverage, which cannot measure compiled code. Coverage below the minimum
of pyproject.toml is a failure. Tests that send SQL to PostgreSQL run on the newest version, and again on the oldest.

    python tools/run_tests.py                 everything
    python tools/run_tests.py unit docs       only these suites, without the checks and the minimum coverage

TEST_JOBS=1 runs one suite at a time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
LONG = ("integration", "apps", "conformance", "server", "unit")
"""Suites that start first, so that no processor is idle at the end."""
PARTS = {
    "conformance on Redis": "conformance/test_*redis.py",
    "conformance on PostgreSQL": "conformance/test_postgres*.py",
}
"""Parts of suites that run as separate jobs."""
CORE = (
    "unit/test_*.py",
    "unit/observe/test_hooks.py",
    "unit/outage",
    "unit/redis/test_codec.py",
    "unit/remote",
    "unit/http/test_frozen.py",
    "unit/http/test_headers.py",
    *(f"conformance/test_{name}.py" for name in ("vectors", "memory", "async_memory", "async_sqlite")),
    "integration/test_queues.py",
)
"""Tests that also run on plain Python: tests of the compiled modules, and further tests for the minimum coverage."""
ONLY_COMPILED = tuple(f"unit/test_{name}.py" for name in ("build", "extras", "platforms"))
"""Tests among `CORE` that run only compiled: on plain Python they add little coverage to the conformance kit."""
OLDEST_POSTGRES = (
    *(
        f"integration/postgres/test_{name}.py"
        for name in (
            *("bucket_cleanup", "bucket_table"),
            *("migrations", "notes", "store"),
        )
    ),
    *(f"integration/test_{name}.py" for name in ("calendars", "extremes")),
    "conformance/test_postgres.py",
    *(
        f"apps/petitions/test_{name}.py"
        for name in (
            *("co_sign", "monitoring", "petition_submission_rate_limit"),
            *("rate_limit_service", "rate_limit_store", "readiness"),
        )
    ),
    "apps/mail/test_idempotency.py",
    "apps/mail/test_storage.py",
    "apps/tiers/test_keys.py",
)
"""Tests that also run on the oldest PostgreSQL of the wheel: all tests that send SQL."""
FEW_EXAMPLES = "10"
"""The number of random examples per property in suites that run a second time."""

BUDGET_SECONDS = 300


class Job(NamedTuple):
    """A command to run, and a JUnit file that it may write."""

    name: str
    command: list[str]
    environment: dict[str, str]
    report: Path | None = None


class Outcome(NamedTuple):
    """The result of a job; `cpu` is the CPU time of all its processes in seconds."""

    name: str
    seconds: float
    cpu: float = 0.0
    passed: int = 0
    failed: int = 0
    skipped: int = 0


def main() -> int:
    """Run the suites named on the command line, or all of them; return the exit code."""
    parser = argparse.ArgumentParser(description="Run the test suites and print the time of each.")
    parser.add_argument("suites", nargs="*", metavar="suite", help="folders under tests/; default: all")
    wanted = parser.parse_args().suites
    run_coverage("erase")
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_jobs(list(jobs_of(wanted, Path(folder)) if wanted else all_jobs(Path(folder))))
    if not wanted:
        outcomes.append(check_coverage())
    print_table(outcomes, time.monotonic() - start)
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def all_jobs(reports: Path) -> list[Job]:
    """Return all jobs."""
    found = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    suites = [*(name for name in LONG if name in found), *sorted(found.difference(LONG))]
    plain = [path for path in paths_of(*CORE) if path not in paths_of(*ONLY_COMPILED)]
    core = pytest_job("plain core", plain, reports, is_measured=True)
    checks = Job("checks", ["make", "check"], environment())
    return [core, oldest_postgres_job(reports), *jobs_of(suites, reports), checks]


def oldest_postgres_job(reports: Path) -> Job:
    """Return the job that runs tests on the oldest PostgreSQL of the wheel."""
    job = pytest_job("oldest PostgreSQL", ["-m", "not deep", *paths_of(*OLDEST_POSTGRES)], reports)
    few = {"HEADGATE_TEST_POSTGRES_VERSION": "16", "HEADGATE_TEST_EXAMPLES": FEW_EXAMPLES}
    return job._replace(environment=job.environment | few)


def jobs_of(suites: Sequence[str], reports: Path) -> list[Job]:
    """Return the jobs of these suites: one per suite, plus one per part that runs separately."""
    jobs = []
    for suite in suites:
        parts = {name: paths_of(part) for name, part in PARTS.items() if part.startswith(f"{suite}/")}
        left_out = [f"--ignore={path}" for paths in parts.values() for path in paths]
        jobs += [pytest_job(name, paths, reports) for name, paths in parts.items()]
        jobs.append(pytest_job(suite, [TESTS / suite, *left_out], reports))
    return jobs


def paths_of(*patterns: str) -> list[Path]:
    """Return the files and folders that match the patterns; exit if a pattern matches nothing."""
    found = [sorted(TESTS.glob(pattern)) for pattern in patterns]
    if not all(found):
        sys.exit(f"no such tests: {patterns[found.index([])]}")
    return [path for paths in found for path in paths]


def pytest_job(name: str, args: Sequence[Path | str], reports: Path, *, is_measured: bool = False) -> Job:
    """Return the job that runs some tests, on plain Python and under coverage if `is_measured`."""
    report = reports / f"{name}.xml"
    measure = ["-m", "coverage", "run", "--parallel-mode"] if is_measured else []
    chosen = ["-m", "not deep"] if is_measured else []
    command = [
        sys.executable,
        *measure,
        "-m",
        "pytest",
        "-q",
        *chosen,
        *map(str, args),
        f"--junit-xml={report}",
    ]
    plain = {"HEADGATE_PURE": "1", "HEADGATE_TEST_EXAMPLES": FEW_EXAMPLES} if is_measured else {}
    return Job(name, command, environment() | plain, report)


def environment() -> dict[str, str]:
    """Return the environment of a job, with bytecode files, so that its many processes need not compile every module."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def run_jobs(jobs: list[Job]) -> list[Outcome]:
    """Run the jobs in order; print the output of each when it ends."""
    # One more than processors, because tests also wait for servers.
    at_once = int(os.environ.get("TEST_JOBS", (os.cpu_count() or 1) + 1))
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(run_job, jobs))


def run_job(job: Job) -> Outcome:
    """Run one job and count its tests."""
    print(f"=== {job.name}: started", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            job.command, cwd=ROOT, env=job.environment, stdout=output, stderr=subprocess.STDOUT
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        shown = output.read().decode(errors="replace")
    seconds = time.monotonic() - start
    passed, failed, skipped = read_report(job.report) if job.report else (0, 0, 0)
    if process.returncode and not failed:  # aborted, or no tests (pytest's exit code 5)
        failed = 1
    print(f"=== {job.name}: ended after {seconds:.0f} s\n{shown}", flush=True)
    return Outcome(job.name, seconds, used.ru_utime + used.ru_stime, passed, failed, skipped)


def read_report(report: Path) -> tuple[int, int, int]:
    """Return the numbers of passed, failed and skipped tests from a JUnit file; zeros if it does not exist."""
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
    """Report the branch coverage of the core; coverage below the minimum of pyproject.toml is a failure."""
    print("=== coverage of the core", flush=True)
    start = time.monotonic()
    code = run_coverage("combine", "--quiet") or run_coverage("report")
    return Outcome("coverage", time.monotonic() - start, failed=int(code != 0))


def run_coverage(*args: str) -> int:
    """Run a command of coverage and return its exit code."""
    return subprocess.run([sys.executable, "-m", "coverage", *args], cwd=ROOT, check=False).returncode


def print_table(outcomes: list[Outcome], total: float) -> None:
    """Print one row per job, the total time and its budget, and the numbers of passed and failed tests."""
    row = "{:<26}{:>10}{:>10}{:>10}{:>10}{:>10}".format
    print("\n" + row("suite", "seconds", "CPU", "passed", "failed", "skipped"))
    for name, seconds, cpu, *counts in outcomes:
        print(row(name, f"{seconds:.1f}", f"{cpu:.1f}", *counts))
    verdict = "within" if total <= BUDGET_SECONDS else "OVER"
    cpu = sum(outcome.cpu for outcome in outcomes)
    print(f"{total:.1f} s in all ({cpu:.0f} s of CPU), {verdict} the budget of {BUDGET_SECONDS} s\n")
    passed = sum(outcome.passed for outcome in outcomes)
    failed = sum(outcome.failed for outcome in outcomes)
    print(f"{passed} passed, {failed} failed")


if __name__ == "__main__":
    sys.exit(main())
