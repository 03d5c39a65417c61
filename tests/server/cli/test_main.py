"""The whole command: exit codes, errors, help, pipes and start-up."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import headgate
from headgate import build
from headgate_server.cli import main, make_parser
from tests.server.cli.conftest import WritePolicy

COMMAND = [sys.executable, "-m", "headgate_server.cli"]

# A background job inherits that SIGINT is ignored.
INTERRUPTIBLE = [
    sys.executable,
    "-c",
    """
import signal, sys
from headgate_server.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main())
""",
]


def all_parsers() -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of all commands, the main parser first."""
    waiting: list[argparse.ArgumentParser] = [make_parser()]
    for parser in waiting:
        yield parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                waiting += action.choices.values()


PARSERS = {parser.prog: parser for parser in all_parsers()}


# Exit codes and errors


def test_success_is_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr() == (f"headgate {headgate.__version__}, core {build.describe()}\n", "")


@pytest.mark.parametrize("arguments", [["dance"], ["check", "--fast"], ["run"], ["bench", "--seconds", "0"]])
def test_wrong_arguments_are_2_and_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert re.fullmatch(r"headgate: .+ \(see `headgate.* --help`\)\n", error)


def test_a_policy_file_without_its_option_is_an_error_with_a_hint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "other.toml"])
    error = capsys.readouterr().err
    assert "unrecognized arguments: other.toml; write --config other.toml for a policy file (see `" in error
    with pytest.raises(SystemExit):
        main(["serve", "--fast"])
    assert "--config" not in capsys.readouterr().err


def test_an_error_is_one_line_without_passwords(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> None:
        raise OSError("no way to redis://ada:s3cret@db\n  at all")

    monkeypatch.setattr("headgate.policy.explain", fail)
    Path("headgate.toml").write_text('limiters.login.rules = ["5/minute"]')
    assert main(["check"]) == 1
    assert capsys.readouterr().err == "headgate: no way to redis://***@db at all\n"


@pytest.mark.parametrize("arguments", [["--debug", "check"], ["check", "--debug"]])
def test_debug_shows_the_traceback_in_every_position(arguments: list[str]) -> None:
    with pytest.raises(headgate.ConfigError):
        main(arguments)


def test_ctrl_c_is_130_without_a_traceback() -> None:
    with subprocess.Popen(
        [*INTERRUPTIBLE, "bench", "--seconds", "60"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert any("measuring memory" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert "Traceback" not in process.stderr.read()


def test_a_missing_policy_file_shows_the_smallest_one(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("check", "serve", "inspect alice", "reset alice --yes"):
        assert main(command.split()) == 1
        error = capsys.readouterr().err
        assert error.startswith("headgate: headgate.toml does not exist; ")
        assert error.count("\n") == 1
    smallest = error.rpartition("one line: ")[2]
    Path("headgate.toml").write_text(smallest)
    assert main(["check"]) == 0
    assert "at most 5 in any minute" in capsys.readouterr().out


# Help


def test_without_a_command_it_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out == make_parser().format_help()


@pytest.mark.parametrize("prog", PARSERS)
def test_every_command_without_subcommands_has_examples(prog: str) -> None:
    parser = PARSERS[prog]
    if parser.get_default("command") is not None:
        assert parser.epilog
        assert parser.epilog.startswith("examples:\n")
        assert prog in parser.epilog


def examples() -> Iterator[list[str]]:
    for parser in PARSERS.values():
        for line in (parser.epilog or "").splitlines():
            words = shlex.split(line.partition(">")[0])
            if "headgate" in words:
                yield words[words.index("headgate") + 1 :]


@pytest.mark.parametrize("arguments", list(examples()), ids=" ".join)
def test_examples_are_valid(arguments: list[str]) -> None:
    if "--help" not in arguments:
        make_parser().parse_args(arguments)


# Pipes, characters, start-up


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_is_not_an_error(unbuffered: str) -> None:
    for arguments in (["version"], ["--help"]):
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(
            [*COMMAND, *arguments],
            stdout=writing,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            check=False,
        )
        os.close(writing)
        assert (done.returncode, done.stderr) == (0, b"")


def test_characters_that_the_encoding_lacks_are_escaped(write_policy: WritePolicy) -> None:
    file = write_policy("[limiters.\"жёлтый\"]\nrules = ['5/minute']")
    done = subprocess.run(
        [*COMMAND, "check", str(file)],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=True,
    )
    assert done.stdout.startswith(rb"\u0436")


def test_start_up_imports_no_framework_and_no_store_driver() -> None:
    probe = "import sys; from headgate_server.cli import main; main(['version']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    imported = {name.split(".")[0] for name in done.stderr.split()}
    assert "headgate" in imported
    outside = (
        imported
        - set(sys.stdlib_module_names)
        - {"headgate", "headgate_server", "headgate_services", "__main__", "cython_runtime"}
    )
    installed_by_the_environment = {name for name in outside if name.startswith(("_", "sitecustomize"))}
    assert outside - installed_by_the_environment == set()
    later = ("client", "http", "policy", "testing", "stores.redis", "stores.postgres")
    assert not {f"headgate.{part}" for part in later} & set(done.stderr.split())
    ours = {
        name for name in done.stderr.split() if name.startswith(("headgate_server.", "headgate_services."))
    }
    assert {name for name in ours if not name.startswith("headgate_server.cli")} == {
        "headgate_server.formatting",
        "headgate_services.commands",
    }
