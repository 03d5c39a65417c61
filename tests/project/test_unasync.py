"""Tests of the tool that generates the synchronous modules."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tools import unasync

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An up-to-date copy of the package and the files that the tool reads."""
    for package in unasync.PACKAGES:
        source = tmp_path / package / "_async"
        source.mkdir(parents=True)
        for file in (ROOT / package / "_async").glob("*.py"):
            (source / file.name).write_text(file.read_text())
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    monkeypatch.setattr(unasync, "ROOT", tmp_path)
    run(monkeypatch)
    return tmp_path / "src" / "headgate"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["unasync.py", *arguments])
    unasync.main()


def test_a_check_fails_on_changed_missing_and_extra_files(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = copied / "_async" / "gates.py"
    source.write_text(source.read_text() + "\nMORE = 1\n")
    (copied / "policy" / "_sync" / "shadows.py").unlink()
    (copied / "policy" / "_sync" / "leftover.py").write_text("")
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, "--check")
    stale = re.findall(r"src/headgate/([\w/.]+)", str(caught.value))
    assert stale == ["_sync/gates.py", "policy/_sync/leftover.py", "policy/_sync/shadows.py"]


def test_writing_fixes_all_differences(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {path: path.read_text() for path in copied.rglob("_sync/*.py")}
    (copied / "_sync" / "hold.py").write_text("nonsense")
    (copied / "policy" / "_sync" / "live.py").unlink()
    (copied / "_sync" / "leftover.py").write_text("")
    run(monkeypatch)
    assert {path: path.read_text() for path in copied.rglob("_sync/*.py")} == expected


def test_an_unused_replacement_is_an_error(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(unasync.REPLACEMENTS, "AsyncUnheardOf", "UnheardOf")
    with pytest.raises(SystemExit, match=r"never used: .*AsyncUnheardOf"):
        run(monkeypatch, "--check")


def test_names_are_replaced_as_whole_words() -> None:
    assert unasync.to_sync("async def f(a: AsyncHold) -> MyAsyncHold: await g\n", set()) == (
        "def f(a: Hold) -> MyAsyncHold: g\n"
    )


def test_async_only_code_is_left_out() -> None:
    text = "a\n    # begin async only\n    b = AsyncHold\n    # end async only\nd = AsyncHold\n"
    used: set[str] = set()
    assert unasync.to_sync(text, used) == "a\nd = Hold\n"
    assert used == {"AsyncHold"}


def test_generated_files_have_a_header(copied: Path) -> None:
    generated = list(copied.rglob("_sync/*.py"))
    assert {file.parent.parent.name for file in generated} == {
        "headgate",
        "leases",
        "outage",
        "policy",
        "remote",
    }
    for file in generated:
        source = file.parent.with_name("_async") / file.name
        assert file.read_text().startswith(
            f"# Generated from {source.relative_to(copied.parent.parent)} by tools/unasync.py."
        )
