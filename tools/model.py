"""Check the model in docs/model with Spin: the algorithms keep their limits, and Spin finds each known bug.

python tools/model.py            the model, then each bug with a trace
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODEL = Path(__file__).resolve().parent.parent / "docs" / "model" / "limiter.pml"
BUGS = {
    "REFUND_FORGETS": "a refund that counts units returned by other refunds as drained",
    "CAP_IS_WRITTEN": "a stored level that is capped at the burst of the call",
}
PROGRAMS = ("spin", "gcc")
SHORT, DEEP = range(24, 64, 4), 100_000
"""Search depth; for a bug it is small, so that the trace is short."""


def main() -> int:
    """Check the model and each bug; return the exit code."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        print(
            f"not found: {' and '.join(missing)}. Install it, for example: apt-get install spin gcc; brew install spin"
        )
        return 1
    is_kept = not shows_error("", "the algorithms without a bug")
    are_found = [shows_error(bug, f"with {description}") for bug, description in BUGS.items()]
    return 0 if is_kept and all(are_found) else 1


def shows_error(bug: str, description: str) -> bool:
    """Search all states, print the result, and return whether a limit was exceeded."""
    print(f"{description} ...", flush=True)
    defined = [f"-D{bug}"] if bug else []
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(MODEL, folder)
        began = time.monotonic()
        run(folder, "spin", "-a", *defined, MODEL.name)
        run(folder, "gcc", "-w", "-O2", "-DSAFETY", "-DCOLLAPSE", "-o", "pan", "pan.c")
        for depth in SHORT if bug else (DEEP,):
            output = run(folder, "./pan", f"-m{depth}")
            if "errors: 0" not in output:
                break
        errors, states = find(r"errors: (\d+)", output), find(r"(\d+) states, stored", output)
        print(
            f"    {states:,} states in {time.monotonic() - began:.0f} s: {'a limit is exceeded' if errors else 'no error'}"
        )
        if errors:
            for line in run(folder, "spin", "-t", *defined, MODEL.name, is_checked=False).splitlines():
                if line.strip().startswith("t="):
                    print(f"    {line.strip().replace('_', ' ')}")
    return errors > 0


def find(pattern: str, output: str) -> int:
    """Return a number from the output of the search."""
    found = re.search(pattern, output)
    if found is None:
        raise SystemExit(f"the search was aborted:\n{output}")
    return int(found.group(1))


def run(folder: str, *command: str, is_checked: bool = True) -> str:
    """Run a program in a folder, and return its output."""
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if is_checked and ended.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{ended.stdout}{ended.stderr}")
    return ended.stdout


if __name__ == "__main__":
    sys.exit(main())
