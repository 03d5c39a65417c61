"""Install the packages of extras of pyproject.toml into this environment, in the versions of constraints.txt.

    .venv/bin/python tools/install_extra.py bench

Unlike `pip install --editable '.[bench]'` it does not compile the core again.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Install the extras named on the command line, and return the exit code."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packages = [package for extra in sys.argv[1:] for package in project["optional-dependencies"][extra]]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    command = [*pip, "--constraint", str(ROOT / "constraints.txt"), *packages]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
