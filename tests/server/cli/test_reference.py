"""The help texts of docs/reference/cli.md are those of the command, and its sessions run.

To update the help texts: `python -m tests.server.cli.test_reference`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.cli.test_main import PARSERS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "cli.md"
HELP = re.compile(r"^```text\n\$ (headgate[a-z -]*) --help\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SESSION = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WIDTH = "100"


def with_help_texts(page: str) -> str:
    """Return the page with the help texts of the command."""
    return HELP.sub(lambda found: f"```text\n$ {found[1]} --help\n{PARSERS[found[1]].format_help()}```", page)


def test_help_texts_are_those_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", WIDTH)
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_help_texts(page)


def test_help_names_no_file_of_the_repository() -> None:
    """Users of a wheel have no docs folder."""
    assert [name for name, parser in PARSERS.items() if "docs/" in parser.format_help()] == []


def test_every_command_is_on_the_page() -> None:
    shown = [found[1] for found in HELP.finditer(PAGE.read_text(encoding="utf-8"))]
    assert sorted(shown) == sorted(PARSERS)


SESSIONS = SESSION.findall(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else []


def test_there_are_sessions() -> None:
    assert SESSIONS


@pytest.mark.parametrize("session", SESSIONS, ids=lambda session: session.partition("\n")[0])
def test_sessions_print_the_documented_output(session: str, here: Path) -> None:
    """`…` matches any text."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = "\n".join(re.findall(r"^\$ (.*)$", session, flags=re.MULTILINE))
    done = subprocess.run(
        ["/bin/sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=here,
        env={**os.environ, "PATH": programs, "COLUMNS": WIDTH},
        check=False,
    )
    expected = re.sub(r"^\$ .*\n", "", session, flags=re.MULTILINE)
    pattern = re.escape(expected).replace("…", ".*")
    assert re.fullmatch(pattern, done.stdout), done.stdout


if __name__ == "__main__":
    os.environ["COLUMNS"] = WIDTH
    PAGE.write_text(with_help_texts(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
