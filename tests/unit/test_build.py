"""The two builds of the core: compiled where possible, plain Python everywhere."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tomllib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import headgate
from headgate import build

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(headgate.__file__).parent

COMPILED = [
    ".".join(path.relative_to(SOURCES.parent).with_suffix("").parts)
    for path in sorted(SOURCES.rglob("*.pxd"))
]

SHOW = """
from headgate import Limiter, build
print(build.describe(), Limiter("2/minute").hit("ada").remaining)
"""


def run(code: str = SHOW, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return result.stdout.strip()


def compiled_file(module: str) -> Path | None:
    source = SOURCES.parent.joinpath(*module.split("."))
    found = [source.with_name(source.name + suffix) for suffix in EXTENSION_SUFFIXES]
    return next((path for path in found if path.exists()), None)


def test_plain_python_can_be_chosen_at_run_time() -> None:
    assert run(HEADGATE_PURE="1") == "in plain Python, because HEADGATE_PURE is set 1"


IN_TWO_INTERPRETERS = """
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
SHOW = '''{show}'''
exec(SHOW)
interpreters.run_string(interpreters.create(), SHOW)
"""


@pytest.mark.skipif(
    sys.version_info[:2] == (3, 12), reason="a second interpreter of 3.12 cannot import its own zoneinfo"
)
def test_subinterpreter_uses_plain_python() -> None:
    """Only one interpreter of a process can load a module that Cython has compiled."""
    first, second = run(IN_TWO_INTERPRETERS.format(show=SHOW)).splitlines()
    assert second.startswith("in plain Python")
    assert (first == second) is not build.is_compiled()
    assert second.endswith(" 1")


@pytest.mark.parametrize("value", ["", "0"])
def test_compiled_core_is_used_if_available(value: str) -> None:
    is_there = compiled_file("headgate.decision") is not None
    assert run(HEADGATE_PURE=value).startswith(
        "compiled" if is_there else "in plain Python: it was installed"
    )


def test_all_core_modules_come_from_one_build() -> None:
    files = [importlib.import_module(module).__file__ or "" for module in COMPILED]
    assert {file.endswith(".py") for file in files} == {not build.is_compiled()}


def test_only_wheels_are_compiled() -> None:
    """An sdist must not contain files that are compiled for one machine."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert "hooks" not in build
    assert [name for name, target in build["targets"].items() if "hooks" in target] == ["wheel"]


@pytest.mark.parametrize("module", COMPILED)
def test_compiled_files_are_not_older_than_their_source(module: str) -> None:
    """Otherwise the tests would run on an outdated core; `make setup` compiles it again."""
    found = compiled_file(module)
    if found is not None:
        source = SOURCES.parent.joinpath(*module.split("."))
        for suffix in (".py", ".pxd"):
            assert found.stat().st_mtime >= source.with_suffix(suffix).stat().st_mtime
