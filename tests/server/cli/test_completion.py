"""`completion`, `--version`, and hints for mistyped commands."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from headgate_server.cli import main, make_parser
from headgate_server.cli.completion import script


def completed(shell: str, line: str) -> list[str]:
    """Return the completions of a line."""
    program, words = script(make_parser(), shell), line.split(" ")
    if shell == "fish":
        options = ["--no-config"]
        program += f"complete -C '{line}'"
    else:
        options = ["-f"] if shell == "zsh" else []
        program += "emulate sh\n" if shell == "zsh" else ""  # as zsh runs scripts for bash
        program += (
            f"COMP_WORDS=({' '.join(words[:-1])} '{words[-1]}'); COMP_CWORD={len(words) - 1}; _headgate; "
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
    found = subprocess.run([shell, *options, "-c", program], capture_output=True, text=True, check=True)
    assert found.stderr == ""
    return [word for word in found.stdout.split() if word.startswith(words[-1])]  # zsh filters by itself


@pytest.mark.parametrize(
    "shell",
    [
        pytest.param(shell, marks=pytest.mark.skipif(shutil.which(shell) is None, reason=f"needs {shell}"))
        for shell in ("bash", "zsh", "fish")
    ],
)
def test_shells_complete_commands_options_and_choices(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some shells also complete files
    monkeypatch.setenv("HOME", str(tmp_path))
    assert completed(shell, "headgate che") == ["check"]
    assert completed(shell, "headgate check --js") == ["--json"]
    assert completed(shell, "headgate run te") == ["telegram"]
    assert completed(shell, "headgate run mail --po") == ["--port"]
    assert completed(shell, "headgate mail inspect --js") == []  # an option of the command `inspect`
    assert completed(shell, "headgate tiers keys c") == ["create"]
    assert completed(shell, "headgate --debug completion z") == ["zsh"]
    assert completed(shell, "headgate check other.toml --js") == ["--json"]
    assert completed(shell, "headgate serve --config check --po") == ["--port"]  # a file with this name
    assert completed(shell, "headgate tiers keys create --ti") == ["--tier"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_script_has_all_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    output = capsys.readouterr().out
    assert all(word in output for word in ("petitions", "resume", "--workers", "load-test"))


def test_a_mistyped_command_gets_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, hint in ((["chekc"], "did you mean check?"), (["run", "male"], "did you mean mail?")):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert hint in capsys.readouterr().err


def test_a_mistyped_option_gets_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--prot", "8081"])
    assert capsys.readouterr().err == (
        "headgate: unrecognized arguments: --prot 8081; did you mean --port? (see `headgate serve --help`)\n"
    )


def test_version_is_a_command_and_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert main(["version"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
