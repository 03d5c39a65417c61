"""Write constraints.txt: the newest versions of all dependencies that install together.

The file contains only `name==version` lines, and therefore no package sources of this machine. It works with any python3 and
uses a temporary environment, so that packages installed by hand are not included.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIN = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+")
HEADER = (
    "# Made by `python3 tools/pin.py`; do not edit. One set for all extras, so that they install together.\n"
)


def main() -> None:
    """Install the newest versions into a temporary environment and write them to constraints.txt."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        pip = [str(Path(folder, "bin", "pip")), "--disable-pip-version-check"]
        wanted = (
            f"{ROOT}[dev,adapters,bench,mutate,browser,dist]",
            f"{ROOT}/server[all]",
            f"{ROOT}/services[all]",
        )
        editable = [part for project in wanted for part in ("--editable", project)]
        subprocess.run([*pip, "install", "--quiet", *editable], check=True)
        freeze = [*pip, "freeze", "--exclude-editable"]
        frozen = subprocess.run(freeze, check=True, capture_output=True, text=True).stdout.splitlines()
    odd = [line for line in frozen if not PIN.fullmatch(line)]
    if odd:
        sys.exit(f"cannot pin lines that are not name==version: {odd}")
    pins = sorted(frozen, key=str.lower)
    (ROOT / "constraints.txt").write_text(HEADER + "".join(f"{pin}\n" for pin in pins), encoding="utf-8")
    print(f"constraints.txt: {len(pins)} packages")


if __name__ == "__main__":
    main()
