"""The tool that writes the synchronous side."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import unasync

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the project as far as the tool sees it, up to date."""
    package = tmp_path / "src" / "headgate"
    (package / "_async").mkdir(parents=True)
    for file in (ROOT / "src" / "headgate" / "_async").glob("*.py"):
        (package / "_async" / file.name).write_text(file.read_text())
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    monkeypatch.setattr(unasync, "ROOT", tmp_path)
    monkeypatch.setattr(unasync, "SOURCE", package / "_async")
    monkeypatch.setattr(unasync, "TARGET", package / "_sync")
    run(monkeypatch)
    return package


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["unasync.py", *arguments])
    unasync.main()


def test_what_is_committed_is_what_the_tool_writes() -> None:
    done = subprocess.run(
        [sys.executable, "tools/unasync.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_check_fails_on_stale_output_and_writes_nothing(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, "--check")
    stale = copied / "_sync" / "hold.py"
    stale.write_text(stale.read_text().replace("cost", "price"))
    before = stale.read_text()
    with pytest.raises(SystemExit, match=r"_sync is not up to date \(hold\.py\): run `make format`"):
        run(monkeypatch, "--check")
    assert stale.read_text() == before


def test_a_check_fails_on_a_changed_source_a_missing_file_and_one_too_many(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = copied / "_async" / "turns.py"
    source.write_text(source.read_text() + "\nMORE = 1\n")
    (copied / "_sync" / "hold.py").unlink()
    (copied / "_sync" / "leftover.py").write_text("")
    with pytest.raises(SystemExit, match=r"\(hold\.py, leftover\.py, turns\.py\)"):
        run(monkeypatch, "--check")


def test_writing_puts_everything_right(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {path.name: path.read_text() for path in (copied / "_sync").glob("*.py")}
    (copied / "_sync" / "hold.py").write_text("nonsense")
    (copied / "_sync" / "limiter.py").unlink()
    (copied / "_sync" / "leftover.py").write_text("")
    run(monkeypatch)
    assert {path.name: path.read_text() for path in (copied / "_sync").glob("*.py")} == expected


def test_a_replacement_that_is_used_nowhere_is_an_error(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(unasync.REPLACEMENTS, "AsyncUnheardOf", "UnheardOf")
    with pytest.raises(SystemExit, match=r"never used: .*AsyncUnheardOf"):
        run(monkeypatch, "--check")


def test_names_are_replaced_as_whole_words() -> None:
    assert unasync.to_sync("async def f(a: AsyncHold) -> MyAsyncHold: await g\n", set()) == (
        "def f(a: Hold) -> MyAsyncHold: g\n"
    )


def test_what_one_side_alone_has_is_left_out_or_brought_in_word_for_word() -> None:
    text = (
        "a\n"
        "    # begin async only\n"
        "    b = AsyncHold\n"
        "    # end async only\n"
        "    # begin sync only\n"
        "    # c = 'for coroutines use AsyncHold'\n"
        "    #\n"
        "    #     indented\n"
        "    # end sync only\n"
        "d = AsyncHold\n"
    )
    used: set[str] = set()
    assert unasync.to_sync(text, used) == (
        "a\n    c = 'for coroutines use AsyncHold'\n    \n        indented\nd = Hold\n"
    )
    assert used == {"AsyncHold"}


def test_generated_files_say_that_they_are(copied: Path) -> None:
    for file in (copied / "_sync").glob("*.py"):
        assert file.read_text().startswith(
            f"# Generated from src/headgate/_async/{file.name} by tools/unasync.py."
        )
