"""Fixtures for tests of the command."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headgate_server.cli import main
from tests.server.cli.stub import Stub, serving

WritePolicy = Callable[[str], Path]
OnTerminal = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and an environment without settings of the command."""
    monkeypatch.chdir(tmp_path)
    for name in ("HEADGATE_TOKEN", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.fixture
def write_policy(here: Path) -> WritePolicy:
    """A function that writes headgate.toml."""

    def write(text: str) -> Path:
        file = here / "headgate.toml"
        file.write_text(text, encoding="utf-8")
        return file

    return write


@pytest.fixture
def server() -> Iterator[Stub]:
    """A stub of the server."""
    with serving() as stub:
        yield stub


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    encoding = "utf-8"  # type: ignore[assignment]  # StringIO has none

    def isatty(self) -> bool:
        return True


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> OnTerminal:
    """A function that runs the command on a terminal and returns its exit code and output."""
    monkeypatch.setenv("TERM", "xterm")

    def run(*arguments: str) -> tuple[int, str]:
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", terminal := Terminal())
            return main(arguments), terminal.getvalue()

    return run
