"""Run the unit suite on every supported Python that is installed, each in its own environment, and print a table.

    python3 tools/versions.py                  all interpreters on PATH and in pyenv
    python3 tools/versions.py python3.13 …     only these

Environments are kept in build/versions. The table lists missing supported versions as not installed; this is not a failure.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED = ("3.11", "3.12", "3.13", "3.14")
ENVIRONMENTS = ROOT / "build" / "versions"
PROJECTS = (".[dev]", "./server[all]", "./services[all]")


class Outcome(NamedTuple):
    """The result of one version."""

    version: str
    result: str
    seconds: float = 0.0
    failed: bool = False


def main() -> int:
    """Run the suite on the interpreters of the command line, or on all interpreters found; return the exit code."""
    given = sys.argv[1:]
    found = {version_of(python): python for python in given} if given else find_pythons()
    outcomes = [run_suite(version, python) for version, python in sorted(found.items(), key=by_number)]
    outcomes += [] if given else [Outcome(name, "not installed") for name in SUPPORTED if name not in found]
    print()
    for outcome in outcomes:
        print(f"Python {outcome.version:<6} {outcome.seconds:6.0f} s  {outcome.result}")
    return 1 if any(outcome.failed for outcome in outcomes) or not found else 0


def by_number(item: tuple[str, str]) -> tuple[int, ...]:
    """Return the sort key of a version."""
    return tuple(map(int, item[0].split(".")))


def find_pythons() -> dict[str, str]:
    """Return a working interpreter for each supported version that has one."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = {}
    for version in SUPPORTED:
        candidates = [
            shutil.which(f"python{version}"),
            *map(str, sorted(pyenv.glob(f"{version}.*/bin/python"))),
        ]
        working = [python for python in candidates if python and version_of(python) == version]
        if working:
            found[version] = working[0]
    return found


def version_of(python: str) -> str:
    """Return the version of an interpreter, such as `3.13`; empty if it does not run, like some shims of pyenv."""
    command = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def run_suite(version: str, python: str) -> Outcome:
    """Install everything for one version and run the unit suite."""
    print(f"=== Python {version}: {python}", flush=True)
    start = time.monotonic()
    environment = ENVIRONMENTS / version
    own = str(environment / "bin" / "python")
    editable = [part for project in PROJECTS for part in ("--editable", project)]
    steps = [
        [python, "-m", "venv", str(environment)],
        [own, "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt", *editable],
        [own, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit"],
    ]
    for step in steps:
        run = subprocess.run(
            step, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        if run.returncode:
            print(run.stdout, flush=True)
            return Outcome(version, last_line(run.stdout), time.monotonic() - start, failed=True)
    return Outcome(version, last_line(run.stdout), time.monotonic() - start)


def last_line(output: str) -> str:
    """Return the last non-empty line of an output."""
    lines = [line for line in output.splitlines() if re.search(r"\w", line)]
    return lines[-1] if lines else "no output"


if __name__ == "__main__":
    sys.exit(main())
