"""`python -m benchmarks`: every subject, one after the other; each also runs alone, as `python -m benchmarks.redis`."""

from __future__ import annotations

import subprocess
import sys

SUBJECTS = (
    "core",
    "http",
    "views",
    "redis",
    "postgres",
    "outage",
    "petitions",
    "server",
    "replay",
    "scale",
)


def main() -> int:
    """Run every subject in a process of its own, and return the exit code of the last that failed."""
    failed = 0
    for subject in SUBJECTS:
        print(f"\n=== {subject} ===", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{subject}", *sys.argv[1:]]
        failed = subprocess.run(command, check=False).returncode or failed
    return failed


if __name__ == "__main__":
    sys.exit(main())
