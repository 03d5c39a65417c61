"""Write `src/headgate/_sync` from `src/headgate/_async`; with --check, only say whether it is up to date.

Names are replaced as whole words. What exists on one side only stands between `# begin async only` and
`# end async only` or, commented out, between `# begin sync only` and `# end sync only`. A replacement that is used
nowhere is an error.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "headgate" / "_async"
TARGET = ROOT / "src" / "headgate" / "_sync"

REPLACEMENTS = {
    r"async def": "def",
    r"await ": "",
    r"AsyncLimiter": "Limiter",
    r"AsyncHold": "Hold",
    r"AsyncTurns": "Turns",
    r"AsyncEvent": "Event",
    r"AsyncGate": "Gate",
    r"AsyncStore": "Store",
    r"open_async_store": "open_store",
    r"bind_async": "bind",
    r"asleep": "sleep",
    r"aclose": "close",
    r"__aenter__": "__enter__",
    r"__aexit__": "__exit__",
    r"_async": "_sync",
    r"Coroutine\[Any, Any, (\w+)\]": r"\1",
    r"Callable, Coroutine, Generator": "Callable",
    r"coroutine function is called": "function is called",
    r"for coroutines\. `headgate\._sync` is generated from here by `tools/unasync\.py`\.": "for threads.",
}
HEADER = "# Generated from {source} by tools/unasync.py. Do not edit.\n"

_ASYNC_ONLY = re.compile(r"^ *# begin async only\n.*?^ *# end async only\n", re.DOTALL | re.MULTILINE)
_SYNC_ONLY = re.compile(r"^ *# begin sync only\n(.*?)^ *# end sync only\n", re.DOTALL | re.MULTILINE)
_COMMENTED = re.compile(r"^( *)# ?", re.MULTILINE)


def to_sync(text: str, used: set[str]) -> str:
    """Return the synchronous text, noting which replacements were used."""
    # The pieces at odd places are what the sync side alone has: it is written as it shall be.
    pieces = _SYNC_ONLY.split(_ASYNC_ONLY.sub("", text))
    pieces[::2] = [_renamed(piece, used) for piece in pieces[::2]]
    pieces[1::2] = [_COMMENTED.sub(r"\1", piece) for piece in pieces[1::2]]
    return "".join(pieces)


def _renamed(text: str, used: set[str]) -> str:
    for pattern, replacement in REPLACEMENTS.items():
        text, count = re.subn(
            rf"(?<!\w){pattern}" + (r"(?!\w)" if pattern[-1].isalnum() else ""), replacement, text
        )
        if count:
            used.add(pattern)
    return text


def generate() -> dict[Path, str]:
    """Return the text of every generated file by its path.

    Raises:
        SystemExit: A replacement is used nowhere.
    """
    used: set[str] = set()
    files = {
        TARGET / path.name: HEADER.format(source=path.relative_to(ROOT)) + to_sync(path.read_text(), used)
        for path in sorted(SOURCE.glob("*.py"))
    }
    if unused := REPLACEMENTS.keys() - used:
        raise SystemExit(f"tools/unasync.py: never used: {sorted(unused)}")
    return {path: tidied(text) for path, text in files.items()}


def tidied(text: str) -> str:
    """Return the text without imports that only the async side needs, formatted."""
    ruff = [sys.executable, "-m", "ruff"]
    fixed = subprocess.run(
        [
            *ruff,
            "check",
            "--quiet",
            "--select=F401,I",
            "--fix",
            "--exit-zero",
            "--stdin-filename=generated.py",
            "-",
        ],
        input=text,
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout
    return subprocess.run(
        [*ruff, "format", "--quiet", "--stdin-filename=generated.py", "-"],
        input=fixed,
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout


def main() -> None:
    files = generate()
    if "--check" in sys.argv:
        found = {path: path.read_text() for path in TARGET.glob("*.py")}
        if found != files:
            names = sorted(p.name for p in {*files, *found} if files.get(p) != found.get(p))
            raise SystemExit(f"src/headgate/_sync is not up to date ({', '.join(names)}): run `make format`")
        return
    for path in set(TARGET.glob("*.py")) - files.keys():
        path.unlink()
    TARGET.mkdir(exist_ok=True)
    for path, text in files.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
