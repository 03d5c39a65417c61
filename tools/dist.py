"""Build and check the release files in dist/: sdist and wheel of all three projects, the library's compiled and plain.

1. Everything is built twice, wheels from the sdist; the two builds must be byte-identical.
2. `twine check`, and a check of the contents: each wheel contains only its own package.
3. Each wheel is installed into an empty environment and used there.

The archives contain the time of the last commit. Needs the extra `dist`; `make dist` installs it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
PROJECTS = {"headgate": ROOT, "headgate_server": ROOT / "server", "headgate_services": ROOT / "services"}
RELATIVE_LINK = re.compile(r'(?:\]\(|src(?:set)?=")(?!https?:|#)([^)"]+)')
PLAIN, COMPILED = {"HEADGATE_PURE": "1"}, {"HEADGATE_COMPILED": "1"}

USE_LIBRARY = """
from headgate import Limiter
from headgate.build import describe
limiter = Limiter("2/minute")
assert [bool(limiter.hit("alice")) for _ in range(3)] == [True, True, False]
print("  ", describe())
"""
USE_SERVER = """
from headgate_server.cli import main
from headgate_server import open_app
open("headgate.toml", "w").write('limiters.login.rules = ["5/minute"]')
assert main(["check"]) == 0
open_app("headgate.toml")
"""
USE_SERVICES = """
from headgate_services import demo, mail, petitions, telegram, tiers
from headgate_server.cli import make_parser
assert "demo" in make_parser().format_help()
"""


def main() -> int:
    """Build, check and use everything; return the exit code."""
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        print("Building everything twice.", flush=True)
        for folder in (first, second):
            build_all(Path(folder))
        if different := differences(Path(first), Path(second)):
            print("not reproducible:", *different)
            return 1
        shutil.rmtree(DIST, ignore_errors=True)
        shutil.copytree(first, DIST)
    files = sorted(DIST.iterdir())
    for file in files:
        print(
            f"  {hashlib.sha256(file.read_bytes()).hexdigest()[:16]}  {file.stat().st_size:>9,}  {file.name}"
        )
    print("The two builds are identical. Checking their contents.", flush=True)
    run(sys.executable, "-m", "twine", "check", "--strict", *map(str, files))
    problems = [problem for file in files for problem in problems_of(file)]
    if problems:
        print(*problems, sep="\n")
        return 1
    use_all()
    print("All checks passed; the files are in dist/.")
    return 0


def run(*command: str, environment: Mapping[str, str] | None = None, folder: Path = ROOT) -> None:
    """Run a command; if it fails, print its output and exit."""
    result = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | dict(environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{result.stdout}")
    if command[1] == "-c":
        print(result.stdout, end="", flush=True)


def build_all(out: Path) -> None:
    """Build the sdist of each project, and its wheels from the sdist."""
    commit_time = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    when = {"SOURCE_DATE_EPOCH": commit_time}
    for name, project in PROJECTS.items():
        hatch(project, out, "sdist", when)
        [sdist] = out.glob(f"{name}-*.tar.gz")
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(sdist) as archive:
                archive.extractall(folder, filter="data")
            [source] = Path(folder).iterdir()
            for build in (PLAIN, COMPILED) if name == "headgate" else (PLAIN,):
                hatch(source, out, "wheel", when | build)


def hatch(project: Path, out: Path, target: str, environment: Mapping[str, str]) -> None:
    """Build one target of one project."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(out)]
    run(*command, environment=environment, folder=project)


def differences(one: Path, other: Path) -> list[str]:
    """Return the names of files that differ between two folders."""
    names = {path.name for folder in (one, other) for path in folder.iterdir()}
    return sorted(
        name
        for name in names
        if not ((one / name).exists() and (other / name).exists())
        or (one / name).read_bytes() != (other / name).read_bytes()
    )


def problems_of(file: Path) -> list[str]:
    """Return the problems of a file's contents."""
    if file.suffix != ".whl":
        return []
    with zipfile.ZipFile(file) as wheel:
        names = wheel.namelist()
        [metadata] = [wheel.read(name).decode() for name in names if name.endswith("/METADATA")]
    links = [f"relative link to {link}" for link in RELATIVE_LINK.findall(metadata)]
    return [f"{file.name}: {problem}" for problem in (*problems_in(file.name, names), *links)]


def problems_in(wheel: str, names: Iterable[str]) -> list[str]:
    """Return the problems of the file list of a wheel."""
    package, version, *_ = wheel.split("-")
    names = list(names)
    own = (f"{package}/", f"{package}-{version}.dist-info/")
    problems = [f"{name} does not belong to {package}" for name in names if not name.startswith(own)]
    if f"{package}/py.typed" not in names:
        problems.append("py.typed is missing")
    compiled = [name for name in names if name.endswith((".so", ".pyd"))]
    if bool(compiled) is wheel.endswith("-none-any.whl"):
        problems.append(f"{len(compiled)} compiled modules, which contradicts the name of the wheel")
    return problems


def use_all() -> None:
    """Install the wheels into empty environments, and use them."""
    [plain] = DIST.glob("headgate-*-none-any.whl")
    [compiled] = set(DIST.glob("headgate-*.whl")) - {plain}
    [server] = DIST.glob("headgate_server-*.whl")
    [services] = DIST.glob("headgate_services-*.whl")
    alone = ("--no-index", "--no-deps")
    pinned = ("--constraint", str(ROOT / "constraints.txt"))
    use("the library, plain", USE_LIBRARY, *alone, str(plain))
    use("the library, compiled", USE_LIBRARY, *alone, str(compiled))
    use("the server", USE_SERVER, *pinned, str(compiled), str(server))
    everything = f"headgate-services[all] @ {services.as_uri()}"
    use("the services", USE_SERVICES, *pinned, str(compiled), str(server), everything)


def use(title: str, program: str, *wanted: str) -> None:
    """Install packages into an empty environment, and run a program there."""
    print(f"Using {title}.", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        python = str(Path(folder, "Scripts" if os.name == "nt" else "bin", "python"))
        run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *wanted)
        run(python, "-c", program, folder=Path(folder))


if __name__ == "__main__":
    sys.exit(main())
