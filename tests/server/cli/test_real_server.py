"""The commands with a real server."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headgate.policy import LivePolicy, load_policy
from headgate_server.cli import main
from tests.server.cli.conftest import WritePolicy
from tests.server.cli.test_main import INTERRUPTIBLE

POLICY = """
[server]
port = 0

[limiters.login]
rules = ["5/hour"]

[limiters.api]
store = "sqlite:///limits.db"
rules = [
  { quota = "10/day burst 20", scope = "user", name = "steady", tiers = { pro = "100/day burst 200" } },
  { quota = "1000/day", scope = "*", name = "everyone" },
]
"""


class Shell:
    """Runs the command in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def run(self, *arguments: str, token: str = "", code: int = 0) -> str:
        """Return the output and errors of the command."""
        self._monkeypatch.setenv("HEADGATE_TOKEN", token)
        assert main(arguments) == code
        output, error = self._capsys.readouterr()
        return output + error

    def new_token(self, file: Path, name: str, *options: str) -> str:
        """Make a token, add its lines to the policy file, and return it."""
        assert main(["token", name, *options]) == 0
        lines, token = self._capsys.readouterr()
        with file.open("a") as policy:
            policy.write(lines)
        return token.rpartition(" ")[2].strip()


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(monkeypatch, capsys)


@contextmanager
def serving() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a server with headgate.toml, and give its address and process."""
    with subprocess.Popen(
        [*INTERRUPTIBLE, "serve"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+", said)
            assert found, said
            yield found[0], process
        finally:
            process.kill()


def test_token_serve_inspect_top_and_reset(write_policy: WritePolicy, shell: Shell) -> None:
    file = write_policy(POLICY)
    reader = shell.new_token(file, "reader")
    operator = shell.new_token(file, "operator", "--may", "decide", "--may", "administer")
    with LivePolicy(load_policy(file)) as live:
        live["api"].record({"user": "alice"}, 30)
    with serving() as (url, process):
        there = ["--server", url]
        assert "give a valid token" in shell.run("inspect", "alice", *there, code=1)
        asked = ["inspect", "alice", "--json", "--tier", "pro"]
        of_server = json.loads(shell.run(*asked, *there, token=reader))
        of_store = json.loads(shell.run(*asked))
        assert [limiter["name"] for limiter in of_server["limiters"]] == ["login", "api"]
        assert of_server["limiters"][0]["results"][0]["limit"] == 5
        assert counted(of_server) == counted(of_store) == {"steady": (30, 200), "everyone": (30, 1000)}

        picture = shell.run("top", "--once", *there, token=reader)
        assert re.search(r"^login +0 +0$", picture, re.MULTILINE)

        assert "administer" in shell.run("reset", "alice", "--yes", *there, token=reader, code=1)
        assert "api: reset for alice" in shell.run("reset", "alice", "--yes", *there, token=operator)
        again = json.loads(shell.run("inspect", "alice", "--json", *there, token=reader))
        assert counted(again) == {"steady": (0, 20), "everyone": (0, 1000)}

        process.send_signal(signal.SIGINT)
        assert process.wait() == 0


def counted(told: dict[str, list[dict[str, object]]]) -> dict[str, tuple[int, int]]:
    """Return used units and limit of every rule of api."""
    [api] = [limiter for limiter in told["limiters"] if limiter["name"] == "api"]
    assert isinstance(api["results"], list)
    return {result["name"]: (result["used"], result["limit"]) for result in api["results"]}
