"""Generate every `_sync` package from the `_async` package beside it; with --check, only verify that they are up to date.

Names are replaced as whole words. Code for the async side only is between `# begin async only` and `# end async only`. Other
differences are in separate modules, such as `headgate._concurrency`. An unused replacement is an error.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "src/headgate",
    "src/headgate/leases",
    "src/headgate/outage",
    "src/headgate/policy",
    "src/headgate/stores/remote",
)
"""The parents of the `_async` and `_sync` packages."""

REPLACEMENTS = {
    r"async def": "def",
    r"await ": "",
    r"AsyncLimiter": "Limiter",
    r"AsyncHold": "Hold",
    r"AsyncHitMethods, pending_call": "HitMethods",
    r"AsyncHitMethods": "HitMethods",
    r"AsyncEvent": "Event",
    r"AsyncGate": "Gate",
    r"AsyncUnlimited": "Unlimited",
    r"AsyncTimed": "Timed",
    r"AsyncQuoted": "Quoted",
    r"AsyncObserved": "Observed",
    r"AsyncObservedHold, PendingHold": "ObservedHold",
    r"AsyncObservedHold": "ObservedHold",
    r"AsyncRemoteGate": "RemoteGate",
    r"AsyncRemoteQueues": "RemoteQueues",
    r"AsyncQueues": "Queues",
    r"_engine\.tell": "_engine.call",
    r"AsyncWaitingTurn": "WaitingTurn",
    r"AsyncLocalQueues": "LocalQueues",
    r"bind_queues_async": "bind_queues",
    r"AsyncResilientGate": "ResilientGate",
    r"AsyncLeasedGate": "LeasedGate",
    r"AsyncCircuit": "Circuit",
    r"call_later_async": "call_later",
    r"ainspect_server": "inspect_server",
    r"AsyncStore": "Store",
    r"AsyncVersion": "Version",
    r"AsyncShadow": "Shadow",
    r"AsyncShadowedGate": "ShadowedGate",
    r"AsyncPolicyLimiter": "PolicyLimiter",
    r"AsyncLivePolicy": "LivePolicy",
    r"bind_async": "bind",
    r"asleep": "sleep",
    r"aclose": "close",
    r"__aenter__": "__enter__",
    r"__aexit__": "__exit__",
    r"_async": "_sync",
    r"Coroutine\[Any, Any, (\w+)\]": r"\1",
    r"Callable, Coroutine, Iterable": "Callable, Iterable",
    r"decorated coroutine function": "decorated function",
    r"Awaitable\[(\w+)\]": r"\1",
    r"AsyncWatched": "Watched",
    r"check_coroutine_function": "check_plain_function",
    r"async with": "with",
    r"pending_call\((self\._wait\(.*\))\)": r"\1",
    r"PendingHold\((self\._hold\(.*\))\)": r"\1",
    r"PendingHold": "Hold",
    r"for coroutines\. `headgate\.(\w+\.)*_sync` is generated from here by `tools/unasync\.py`\.": "for threads.",
}
HEADER = "# Generated from {source} by tools/unasync.py. Do not edit.\n"

_ASYNC_ONLY = re.compile(r"^ *# begin async only\n.*?^ *# end async only\n", re.DOTALL | re.MULTILINE)


def to_sync(text: str, used: set[str]) -> str:
    """Return the synchronous text, and add the used replacements to `used`."""
    return _renamed(_ASYNC_ONLY.sub("", text), used)


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
        SystemExit: A replacement is never used.
    """
    used: set[str] = set()
    files = {
        path.parent.with_name("_sync") / path.name: HEADER.format(source=path.relative_to(ROOT))
        + to_sync(path.read_text(), used)
        for package in PACKAGES
        for path in sorted((ROOT / package / "_async").glob("*.py"))
    }
    if unused := REPLACEMENTS.keys() - used:
        raise SystemExit(f"tools/unasync.py: never used: {sorted(unused)}")
    return tidied(files)


def tidied(files: dict[Path, str]) -> dict[Path, str]:
    """Return the formatted texts, without imports that only the async side needs."""
    ruff = [sys.executable, "-m", "ruff"]
    settings = ["--quiet", "--no-cache", f"--config={ROOT / 'pyproject.toml'}"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copies = {path: folder / f"generated_{number}.py" for number, path in enumerate(files)}
        for path, copy in copies.items():
            copy.write_text(files[path])
        fix = ["check", "--select=F401,I", "--fix", "--exit-zero", *settings, name]
        subprocess.run([*ruff, *fix], check=True)
        subprocess.run([*ruff, "format", *settings, name], check=True)
        return {path: copy.read_text() for path, copy in copies.items()}


def main() -> None:
    files = generate()
    found = {
        path: path.read_text() for package in PACKAGES for path in (ROOT / package / "_sync").glob("*.py")
    }
    if "--check" in sys.argv:
        if found != files:
            stale = {path for path in {*files, *found} if files.get(path) != found.get(path)}
            names = ", ".join(sorted(str(path.relative_to(ROOT)) for path in stale))
            raise SystemExit(f"generated code is not up to date ({names}): run `make format`")
        return
    for path in found.keys() - files.keys():
        path.unlink()
    for path, text in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
