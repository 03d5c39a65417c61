"""The GitHub workflows use existing files, make targets and Python versions.

actionlint checks their syntax; CONTRIBUTING.md has the command.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.versions import SUPPORTED

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    return content


def commands(workflow: Path) -> list[str]:
    """Return the shell commands of all steps."""
    jobs = read(workflow)["jobs"].values()
    return [step["run"] for job in jobs for step in job.get("steps", []) if "run" in step]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_commands_use_targets_and_scripts_that_exist(workflow: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for command in commands(workflow):
        assert set(re.findall(r"\bmake (\w+)", command)) <= targets
        scripts = re.findall(r"(?<!\S)((?:\.ci|tools)/\S+)", command)
        assert [script for script in scripts if not (ROOT / script).exists()] == []


def test_supported_versions_are_tested_and_declared() -> None:
    tested = read(ROOT / ".github/workflows/tests.yml")["jobs"]["versions"]["strategy"]["matrix"]["python"]
    assert tuple(tested) == SUPPORTED
    for project in (".", "server", "services"):
        text = (ROOT / project / "pyproject.toml").read_text("utf-8")
        classifiers = tomllib.loads(text)["project"]["classifiers"]
        declared = [found[1] for line in classifiers if (found := re.search(r":: (3\.\d+)$", line))]
        assert tuple(declared) == SUPPORTED


def test_wheels_are_built_for_every_declared_architecture() -> None:
    systems = read(ROOT / ".github/workflows/wheels.yml")["jobs"]["compiled"]["strategy"]["matrix"]["include"]
    built = {arch for system in systems for arch in system["archs"].split()}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["cibuildwheel"]
    assert built == {arch for name in ("linux", "macos", "windows") for arch in settings[name]["archs"]}
