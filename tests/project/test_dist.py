"""Tests of the checks of wheels in `make dist`, which checks the real wheels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.dist import RELATIVE_LINK, differences, problems_in

FILES = ["headgate/__init__.py", "headgate/py.typed", "headgate-1.0.dist-info/METADATA"]
PLAIN, COMPILED = "headgate-1.0-py3-none-any.whl", "headgate-1.0-cp311-cp311-linux_x86_64.whl"
MODULE = "headgate/decision.cpython-311-x86_64-linux-gnu.so"


@pytest.mark.parametrize(("wheel", "files"), [(PLAIN, FILES), (COMPILED, [*FILES, MODULE])])
def test_a_good_wheel_has_no_problems(wheel: str, files: list[str]) -> None:
    assert problems_in(wheel, files) == []


@pytest.mark.parametrize(
    ("wheel", "files"),
    [
        (PLAIN, [*FILES, "headgate_services/__init__.py"]),
        (PLAIN, [*FILES, "tests/conftest.py"]),
        (PLAIN, [*FILES, MODULE]),
        (COMPILED, FILES),
        (PLAIN, [name for name in FILES if not name.endswith("py.typed")]),
    ],
)
def test_a_bad_wheel_has_a_problem(wheel: str, files: list[str]) -> None:
    assert len(problems_in(wheel, files)) == 1


def test_builds_differ_by_content_and_by_name(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "same").write_text("x")
        (folder / "changed").write_text(folder.name)
    (other / "added").write_text("x")
    assert differences(one, other) == ["added", "changed"]


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("[a](docs/a.md)", ["docs/a.md"]),
        ('<img src="b.png">', ["b.png"]),
        ("[a](https://example.org) [b](#below)", []),
    ],
)
def test_relative_links_are_found(text: str, links: list[str]) -> None:
    assert RELATIVE_LINK.findall(text) == links
