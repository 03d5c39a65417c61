"""Break the core in known ways, one at a time; a test must notice each.

`tools/mutations.toml` lists the mutations: a file under src/headgate, its exact text, what to put there instead, why that
matters, and the tests that must fail. Each is made in a copy of src, never in place; of the generated half, `_sync` is
written anew from what was broken in `_async`. A mutation that survives, or whose text is no longer there, is a failure:
then a test is missing, or the list is out of date.

    python tools/mutate.py                 all of them
    python tools/mutate.py token_bucket    those whose file, text or reason contains this
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src", "headgate")
MUTATIONS = ROOT / "tools" / "mutations.toml"
LONGER = 5
"""Tests that take so many times as long as without the mutation, and some seconds more, hang: it has been noticed."""

Fate = Literal["killed", "survived", "does not apply"]


@dataclass(frozen=True)
class Mutation:
    """One way to break the core.

    Attributes:
        file: Where, under src/headgate.
        old: The text to be replaced; stands there exactly once.
        new: What is put there instead.
        why: What would go wrong.
        tests: What to give to pytest: the quickest tests that must fail.
    """

    file: str
    old: str
    new: str
    why: str
    tests: str

    @property
    def path(self) -> Path:
        return PACKAGE / self.file

    def applied_to(self, text: str) -> str | None:
        """Return the broken text, or `None` if this is not about it."""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None


class Outcome(NamedTuple):
    """What became of a mutation."""

    mutation: Mutation
    fate: Fate
    seconds: float


def load() -> list[Mutation]:
    """Return the committed list."""
    return [Mutation(**entry) for entry in tomllib.loads(MUTATIONS.read_text(encoding="utf-8"))["mutation"]]


def main() -> int:
    """Try the mutations that were asked for, or all; return the exit code."""
    parser = argparse.ArgumentParser(description="Break the core in known ways; a test must notice each.")
    parser.add_argument("about", nargs="?", default="", help="only mutations that mention this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many to try at once")
    arguments = parser.parse_args()
    chosen = [m for m in load() if arguments.about in f"{m.file}\n{m.old}\n{m.new}\n{m.why}"]
    if not chosen:
        sys.exit(f"no mutation is about {arguments.about!r}")
    start = time.monotonic()
    patience = measured(chosen)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        outcomes = []
        for outcome in pool.map(lambda mutation: try_out(mutation, patience[mutation.tests]), chosen):
            outcomes.append(outcome)
            print_line(outcome)
    return summed_up(outcomes, time.monotonic() - start)


def measured(mutations: Sequence[Mutation]) -> dict[str, float]:
    """Return how many seconds to give to each of the tests.

    Raises:
        SystemExit: Some fail without any mutation; they would kill everything.
    """
    patience = {}
    with copied_source() as copy:
        for tests in sorted({mutation.tests for mutation in mutations}):
            start = time.monotonic()
            if fails(tests, copy, None):
                sys.exit(f"pytest {tests} fails without any mutation")
            patience[tests] = 10 + LONGER * (time.monotonic() - start)
    return patience


def try_out(mutation: Mutation, patience: float) -> Outcome:
    """Make one mutation and see whether its tests notice."""
    start = time.monotonic()
    broken = mutation.applied_to((ROOT / mutation.path).read_text(encoding="utf-8"))
    if broken is None:
        return Outcome(mutation, "does not apply", 0.0)
    with copied_source() as copy:
        (copy / mutation.path).write_text(broken, encoding="utf-8")
        if mutation.file.startswith("_async/"):
            write_sync_side(copy)
        fate: Fate = "killed" if fails(mutation.tests, copy, patience) else "survived"
    return Outcome(mutation, fate, time.monotonic() - start)


@contextmanager
def copied_source() -> Iterator[Path]:
    """Copy what is imported and what writes the generated half of it."""
    with tempfile.TemporaryDirectory(prefix="headgate-mutant-") as folder:
        copy = Path(folder)
        for part in ("src", "tools"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        yield copy


def write_sync_side(copy: Path) -> None:
    subprocess.run([sys.executable, "tools/unasync.py"], cwd=copy, check=True)


def fails(tests: str, copy: Path, patience: float | None) -> bool:
    """Run tests of the project on the copy, and return whether they notice something, or hang."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy / "src"),  # comes before the installed package
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()]
    with (
        tempfile.TemporaryFile() as output
    ):  # a pipe would stay open in children that a hanging test has forked
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=output,
                timeout=patience,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return True
        if done.returncode not in (
            0,
            1,
        ):  # neither passed nor failed: no such test, or it could not be collected
            output.seek(0)
            sys.exit(f"pytest {tests} broke off:\n{output.read().decode()}")
    return done.returncode == 1


def print_line(outcome: Outcome) -> None:
    fate = outcome.fate if outcome.fate == "killed" else outcome.fate.upper()
    print(
        f"{fate:<15}{outcome.seconds:>5.1f} s  {outcome.mutation.file:<32} {outcome.mutation.why}", flush=True
    )


def summed_up(outcomes: Sequence[Outcome], seconds: float) -> int:
    """Print what is wrong, if anything, and return the exit code."""
    wrong = [outcome for outcome in outcomes if outcome.fate != "killed"]
    for mutation, fate, _ in wrong:
        print(f"\n{fate}: {mutation.path}\n- {mutation.old!r}\n+ {mutation.new!r}\n  pytest {mutation.tests}")
    print(f"\n{len(outcomes) - len(wrong)} of {len(outcomes)} mutations killed in {seconds:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
