"""`completion`, `--version`, and what is said to a mistyped command."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from headgate_server.cli import main, make_parser
from headgate_server.cli.completion import script


def completed(line: str) -> list[str]:
    """Return what bash offers at the end of a line."""
    bash = shutil.which("bash")
    assert bash, "bash is needed"
    words = line.split(" ")
    program = script(make_parser(), "bash") + (
        f"COMP_WORDS=({' '.join(words[:-1])} '{words[-1]}'); COMP_CWORD={len(words) - 1}; _headgate; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    return subprocess.run([bash, "-c", program], capture_output=True, text=True, check=True).stdout.split()


def test_bash_completes_commands_options_and_choices() -> None:
    assert completed("headgate che") == ["check"]
    assert completed("headgate check --js") == ["--json"]
    assert completed("headgate run te") == ["telegram"]
    assert completed("headgate run mail --po") == ["--port"]
    assert completed("headgate tiers keys c") == ["create"]
    assert completed("headgate --debug completion z") == ["zsh"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_is_told_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    output = capsys.readouterr().out
    assert all(word in output for word in ("petitions", "resume", "--workers", "load-test"))


def test_a_mistyped_command_is_told_what_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, hint in ((["chekc"], "did you mean check?"), (["run", "male"], "did you mean mail?")):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert hint in capsys.readouterr().err


def test_the_version_is_an_option_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert main(["version"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
