"""The command line and the tour, as a user meets them."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import headgate
from headgate.cli import main
from headgate.tour import tour


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"headgate {headgate.__version__}\n"


def test_without_a_command_it_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "headgate tour" in capsys.readouterr().out


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["dance"])
    assert exit_.value.code == 2
    assert "dance" in capsys.readouterr().err


def test_check_explains_a_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "headgate.toml"
    file.write_text('[limiters.login]\nrules = ["5/minute"]')
    assert main(["check", str(file)]) == 0
    assert "at most 5 in any minute" in capsys.readouterr().out


def test_a_failure_is_one_line_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "headgate.toml"
    file.write_text('[limiters.login]\nrules = ["5/fortnight"]')
    assert main(["check", str(file)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"headgate: {file}:2:10: ")
    assert error.count("\n") == 1


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(headgate.ConfigError):
        main(["--debug", "check", str(tmp_path / "absent.toml")])


def test_a_service_without_its_packages_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "headgate.apps.mail", raising=False)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    for name in [name for name in sys.modules if name.startswith("headgate.apps.mail.")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["run", "mail"]) == 1
    assert "pip install 'headgate[mail]'" in capsys.readouterr().err


def test_the_tour_tells_what_it_promises() -> None:
    lines: list[str] = []
    tour(fast=True, say=lines.append)
    text = "\n".join(lines)
    assert "60 of 120 admitted" in text
    assert "20 admitted within a tenth of a second" in text
    assert "cem still has 3 of 5" in text
    assert "settled at 300: 700 left" in text
    assert "admitted per tenth of a second: 5 1 1 1 1 1 1 1 1 1 1" in text
    assert text.count("✗ second run") == 1
    assert "\x1b[" not in text


def test_the_tour_is_coloured_on_a_terminal_only() -> None:
    leader, follower = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    command = [sys.executable, "-m", "headgate.cli", "tour", "--fast"]
    process = subprocess.Popen(command, stdout=follower, env=environment)
    os.close(follower)
    output = b""
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # how Linux says that the other side is closed
            break
        if not chunk:
            break
        output += chunk
    os.close(leader)
    assert process.wait() == 0
    assert "\x1b[32m█\x1b[0m".encode() in output
    plain = subprocess.run(command, capture_output=True, check=True, env=environment).stdout
    assert b"\x1b[" not in plain
