"""Run all benchmarks: `python -m benchmarks [--quick]`. To run one: `python -m benchmarks.redis`."""

from __future__ import annotations

import subprocess
import sys

SUBJECTS = (
    "memory",
    "sqlite",
    "redis",
    "postgres",
    "waiting",
    "server",
    "envoy",
    "http",
    "petitions",
    "replay",
    "scale",
)


def main() -> int:
    """Run every subject in a new process, and return the exit code of the last failed subject."""
    failed = 0
    for subject in SUBJECTS:
        print(f"\n=== {subject} ===", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{subject}", *sys.argv[1:]]
        failed = subprocess.run(command, check=False).returncode or failed
    return failed


if __name__ == "__main__":
    sys.exit(main())
