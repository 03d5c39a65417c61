"""Mutation tests: change the core in one place at a time, and count how many mutants a test detects.

Cosmic Ray makes the mutants: it replaces an operator, a comparison, a number or a condition. It works on copies of the
source, which run as plain Python. Each group of modules runs the fastest tests that should detect its mutants. A group
fails if it detects less than its minimum percentage of mutants. Surviving mutants are printed as diffs.

    python tools/mutate.py                 a sample of each group, the same every time
    python tools/mutate.py --mutants 0     all of them; takes hours
    python tools/mutate.py algorithms      one group
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkResult

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("src", "tests", "pyproject.toml")
SAMPLE = 100
"""Default number of mutants per group."""
TIMEOUT_SECONDS = 120.0
"""Timeout of the tests of a mutant; a timeout counts as detected."""

# Only neighbouring operators: `a < b` to `a <= b` needs a test of the edge, `a < b` to `a != b` does not.
# `|` is not replaced, because it is used in type hints.
USED = re.compile(
    r"core/(?:ReplaceComparisonOperator_(?:Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is|Lt_Gt|Gt_Lt)"
    r"|ReplaceBinaryOperator_(?:Add_Sub|Sub_Add|Mul_FloorDiv|FloorDiv_Mul|Mod_Add)"
    r"|ReplaceUnaryOperator_(?:USub_UAdd|Delete_Not)"
    r"|AddNot|NumberReplacer|ReplaceAndWithOr|ReplaceOrWithAnd|ReplaceTrueWithFalse|ReplaceFalseWithTrue"
    r"|ReplaceBreakWithContinue|ReplaceContinueWithBreak|ZeroIterationForLoop)"
)


class Group(NamedTuple):
    """Modules with the same tests.

    Attributes:
        modules: Files and folders under src/headgate.
        tests: Files under tests.
        minimum: Minimum percentage of detected mutants. Some mutants do not change observable behaviour.
    """

    modules: tuple[str, ...]
    tests: tuple[str, ...]
    minimum: int


GROUPS = {
    "algorithms": Group(
        ("algorithms",),
        (
            "conformance/test_vectors.py",
            "unit/test_algorithms.py",
            "unit/test_calendars.py",
            "unit/test_large_states.py",
            "unit/test_leases.py",
            "unit/test_moves.py",
            "unit/test_penalties.py",
            "unit/test_waiting_order.py",
        ),
        75,
    ),
    "memory": Group(
        ("stores/meters.py", "stores/counters.py"),
        (
            "conformance/test_memory.py",
            "conformance/test_vectors.py",
            "unit/test_memory.py",
            "unit/test_hold.py",
            "unit/test_moves.py",
            "unit/test_penalties.py",
        ),
        75,
    ),
    "values": Group(
        ("decision.py", "quota.py", "costs.py"),
        (
            "unit/test_decision.py",
            "unit/test_quota.py",
            "unit/test_costs.py",
            "unit/test_leases.py",
            "unit/test_limiter.py",
            "unit/test_pickling.py",
        ),
        75,
    ),
}
LEFT_OUT = "vectors_have_the_answers or racing or threads"
"""Name patterns of slow tests that detect few additional mutants."""


class Score(NamedTuple):
    """The results of a group."""

    name: str
    tried: int
    survivors: list[str]

    @property
    def percent(self) -> float:
        return 100 * (1 - len(self.survivors) / self.tried) if self.tried else 0.0


def main() -> int:
    """Test the groups named on the command line, or all of them; return the exit code."""
    parser = argparse.ArgumentParser(description="Count how many mutants of the core the tests detect.")
    parser.add_argument("groups", nargs="*", metavar="group", help=f"{', '.join(GROUPS)}; default: all")
    parser.add_argument(
        "--mutants", type=int, default=SAMPLE, help=f"mutants per group; 0 for all; default {SAMPLE}"
    )
    options = parser.parse_args()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        scores = list(pool.map(lambda name: try_group(name, options.mutants), options.groups or GROUPS))
    for score in scores:
        print(*score.survivors, sep="\n")
    for score in scores:
        minimum = GROUPS[score.name].minimum
        verdict = "reached" if score.percent >= minimum else "TOO LOW"
        print(
            f"{score.name}: {score.percent:.0f} % of {score.tried} detected, minimum {minimum} %: {verdict}"
        )
    return int(any(score.percent < GROUPS[score.name].minimum for score in scores))


def try_group(name: str, mutants: int) -> Score:
    """Make the mutants of a group, and run its tests with each mutant."""
    group = GROUPS[name]
    with tempfile.TemporaryDirectory(prefix="headgate-mutants-") as folder:
        copy = Path(folder)
        for part in COPIED:
            if (ROOT / part).is_dir():
                shutil.copytree(
                    ROOT / part, copy / part, ignore=shutil.ignore_patterns("*.so", "__pycache__")
                )
            else:
                shutil.copy(ROOT / part, copy / part)
        write_config(copy, group)
        cosmic_ray(copy, "init")
        with use_db(copy / "session.sqlite", WorkDB.Mode.open) as session:
            tried = sample(session, mutants, copy)
        print(f"{name}: {tried} mutants", flush=True)
        cosmic_ray(copy, "baseline")
        cosmic_ray(copy, "exec")
        with use_db(copy / "session.sqlite", WorkDB.Mode.open) as session:
            return Score(name, tried, survivors(session))


def write_config(copy: Path, group: Group) -> None:
    """Write the configuration of Cosmic Ray for a group."""
    modules = ", ".join(f'"src/headgate/{module}"' for module in group.modules)
    tests = " ".join(f"tests/{test}" for test in group.tests)
    (copy / "mutants.toml").write_text(
        f"""[cosmic-ray]
module-path = [{modules}]
timeout = {TIMEOUT_SECONDS}
excluded-modules = []
test-command = "{sys.executable} -m pytest -q -x -p no:cacheprovider -k 'not ({LEFT_OUT})' {tests}"
[cosmic-ray.distributor]
name = "local"
""",
        encoding="utf-8",
    )


def cosmic_ray(copy: Path, command: str) -> None:
    """Run a command of Cosmic Ray on a copy of the project."""
    files = ["mutants.toml"] if command == "baseline" else ["mutants.toml", "session.sqlite"]
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "HEADGATE_PURE": "1"}
    program = [sys.executable, "-m", "cosmic_ray.cli", command, *files]
    subprocess.run(program, cwd=copy, env=environment, check=True, stdin=subprocess.DEVNULL)


def sample(session: WorkDB, mutants: int, copy: Path) -> int:
    """Skip mutants that are not in the sample, and return the size of the sample."""
    items = session.work_items
    used = sorted(
        (item for item in items if all(is_used(mutation, copy) for mutation in item.mutations)),
        key=lambda item: [
            (str(m.module_path), m.start_pos, m.operator_name, m.occurrence) for m in item.mutations
        ],
    )
    tried = random.Random(20).sample(used, mutants) if 0 < mutants < len(used) else used
    skipped = {item.job_id for item in items} - {item.job_id for item in tried}
    session.set_multiple_results(skipped, WorkResult(worker_outcome=WorkerOutcome.SKIPPED))
    return len(tried)


def is_used(mutation: MutationSpec, copy: Path) -> bool:
    """Return whether to use a mutation. `zip(strict=False)` is not detectable if the arguments have the same length."""
    line, column = mutation.start_pos
    before = (copy / mutation.module_path).read_text().splitlines()[line - 1][:column]
    return bool(USED.fullmatch(mutation.operator_name)) and not before.endswith("strict=")


def survivors(session: WorkDB) -> list[str]:
    """Return the surviving mutants as diffs."""
    return [
        result.diff or ""
        for _, result in session.results
        if result.worker_outcome == WorkerOutcome.NORMAL and result.test_outcome == TestOutcome.SURVIVED
    ]


if __name__ == "__main__":
    sys.exit(main())
