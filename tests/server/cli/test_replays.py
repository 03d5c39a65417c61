"""`replay` and `suggest`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from headgate.policy import load_policy
from headgate_server.cli import main, make_parser
from headgate_server.replay import DEFAULT_BUFFER
from headgate_server.replay.recording import record_line
from tests.server.cli.conftest import WritePolicy

POLICY = '[limiters.api]\nrules = ["2/minute"]\n'


def write_log(folder: Path, seconds: int = 20, name: str = "access.log") -> Path:
    log = folder / name
    log.write_text(
        "".join(
            f"192.0.2.{second % 3} - - [01/May/2024:12:{second // 60:02}:{second % 60:02} +0000] "
            f'"GET /a/{second} HTTP/1.1" 200 9 "-" "-"\n'
            for second in range(seconds)
        ),
        encoding="utf-8",
    )
    return log


@pytest.fixture
def log(here: Path) -> Path:
    return write_log(here)


def test_replay_prints_a_report(
    write_policy: WritePolicy, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_policy(POLICY)
    assert main(["replay", str(log)]) == 0
    out, err = capsys.readouterr()
    assert "Would have refused 14 of 20 requests (70.0 %), of 3 of 3 keys." in out
    assert "GET /a/:id" in out
    assert err == ""


def test_json_page_and_decisions(
    write_policy: WritePolicy, log: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_policy(POLICY)
    (here / "other.toml").write_text('[limiters.other]\nrules = ["9/minute"]\n', encoding="utf-8")
    arguments = ["replay", str(log), "--json", "--html", "page.html", "--decisions", "all.jsonl"]
    assert main([*arguments, "--compare", "other.toml", "--model-retries"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["result"]["refused"] == 14
    assert report["result"]["retries"]["tries"] == 3
    assert report["compare"]["changes"]["newly_admitted"] == 14
    assert "other of other.toml" in (here / "page.html").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in (here / "all.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 20
    assert sum(not line["allowed"] for line in lines) == 14
    assert all(line["compare"]["allowed"] for line in lines)


def test_several_logs_and_standard_input_are_merged(
    write_policy: WritePolicy,
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_policy(POLICY)
    first, second = write_log(here, name="a"), write_log(here, name="b")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(second.read_bytes()))))
    assert main(["replay", str(first), "-", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["result"]["requests"] == 40
    assert report["log"]["files"] == {str(first): "combined", "standard input": "combined"}


def test_scopes_tiers_and_costs_are_expressions(
    write_policy: WritePolicy, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_policy(
        '[limiters.api]\nrules = [{ quota = "4/minute", scope = "user", tiers = { pro = "9/minute" } }, '
        '{ quota = "100/minute", scope = "ip" }]\n'
    )
    (here / "log.csv").write_text(
        "time,user,client,plan,size\n1,ann,x,gold,6\n2,ann,x,gold,3\n3,bob,y,,3\n4,bob,y,,3\n",
        encoding="utf-8",
    )
    arguments = ["replay", "log.csv", "--json", "--scope", "user={user}", "--key", "{client}"]
    assert main([*arguments, "--tier", "{plan|map:gold=pro}", "--cost", "{size}"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["refused"] == 1
    assert result["worst_callers"][0]["key"] == "user=bob, ip=y"


def test_a_recording_is_replayed_by_its_limiter(
    write_policy: WritePolicy, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_policy(POLICY + '[limiters.login]\nrules = ["1/minute"]\n')
    lines = [record_line(at, name, "hit", "a", 1, None, True) for at in (1, 2) for name in ("api", "login")]
    (here / "trace.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert main(["replay", "trace.jsonl", "--limiter", "login", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["result"]["requests"], report["result"]["refused"]) == (2, 1)
    (skipped,) = report["log"]["bad_by_reason"]
    assert (skipped["reason"], skipped["count"]) == ("recorded for another limiter", 2)
    (here / "trace.jsonl").write_text(lines[0], encoding="utf-8")
    assert main(["replay", "trace.jsonl", "--limiter", "login"]) == 1
    assert "none of the 1 lines could be replayed; 1: recorded for another limiter" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["nothing.log"], 1, "nothing.log: no such file"),
        (["access.log", "--limiter", "web"], 2, "has no limiter 'web'; use one of api"),
        (["access.log", "--config", "none.toml"], 1, "none.toml does not exist"),
        (["access.log", "--compare", "none.toml"], 1, "none.toml does not exist"),
        (
            ["access.log", "--key", "{clinet}"],
            1,
            "there is no field 'clinet' in this log (combined); it has client",
        ),
        (["access.log", "--scope", "user={user}"], 2, "no rule counts by it; the scopes are: none"),
        (["access.log", "--compare", "scoped.toml"], 2, "cannot be compared"),
        (["access.log", "--key", "{user}"], 1, "none of the 20 lines could be replayed; 20: no key"),
        (["empty.log"], 1, "it is empty"),
        (["header.csv"], 1, "none of the 1 lines is a request"),
        (["empty.log", "--format", "json"], 1, "the log is empty"),
        (["access.log", "--format", "json"], 1, "none of the 20 lines could be replayed; 20: not JSON"),
        (["-", "-"], 2, "(-) can be given only once"),
        (["access.log", "--html", "no/such/folder.html"], 1, "no/such/folder.html"),
    ],
)
def test_an_error_is_one_line(
    write_policy: WritePolicy,
    log: Path,
    here: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    problem: str,
) -> None:
    write_policy(POLICY)
    (here / "scoped.toml").write_text(
        '[limiters.api]\nrules = [{ quota = "2/minute", scope = "user" }]\n', encoding="utf-8"
    )
    (here / "empty.log").touch()
    (here / "header.csv").write_text("time,client\n", encoding="utf-8")
    assert main(["replay", *arguments]) == code
    err = capsys.readouterr().err
    assert problem in err
    assert err.startswith("headgate: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["replay"],
        ["replay", "a", "--scope", "user"],
        ["replay", "a", "--model-retries", "0"],
        ["replay", "a", "--buffer", "1"],
        ["suggest", "a", "--refuse-at-most", "2"],
        ["suggest", "a", "--refuse-at-most", "nan"],
        ["suggest", "a", "--refuse-at-most", "much"],
    ],
)
def test_wrong_arguments_are_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert capsys.readouterr().err.startswith("headgate: ")


def test_the_default_buffer_is_that_of_the_library() -> None:
    assert make_parser().parse_args(["replay", "a"]).buffer == DEFAULT_BUFFER


def test_several_limiters_require_the_option(
    write_policy: WritePolicy, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_policy(POLICY + '[limiters.login]\nrules = ["1/minute"]\n')
    assert main(["replay", str(log)]) == 2
    assert "has several limiters; add --limiter, one of api, login" in capsys.readouterr().err


def test_suggest_prints_lines_for_a_policy_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(here, 600)
    assert main(["suggest", str(log), "--refuse-at-most", "1%", "--name", "web"]) == 0
    text = capsys.readouterr().out
    (here / "headgate.toml").write_text(text, encoding="utf-8")
    assert list(load_policy("headgate.toml").limiters) == ["web"]
    assert "THIN DATA" in text
    assert main(["replay", str(log), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["refused_share"] <= 0.01
    assert main(["suggest", str(log), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 600


def test_suggest_without_valid_lines_is_an_error(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "log.csv").write_text("time,client\nx,y\n", encoding="utf-8")
    assert main(["suggest", "log.csv"]) == 1
    assert "none of the 2 lines could be replayed; 1: a time that cannot be read" in capsys.readouterr().err


def test_progress_is_shown_on_a_terminal_and_cleared(
    write_policy: WritePolicy,
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_policy(POLICY)
    log = write_log(here, 600)
    monkeypatch.setattr("headgate_server.cli.replays._SECONDS_BETWEEN_PROGRESS", 0.0)
    assert main(["replay", str(log)]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(["replay", str(log)]) == 0
    out, err = capsys.readouterr()
    assert "replaying: 100%, " in err
    assert err.endswith("\r\x1b[K")
    assert "replaying" not in out
    assert main(["suggest", str(log)]) == 0
    assert "looking for limits per minute" in capsys.readouterr().err
