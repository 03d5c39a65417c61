"""`check`, `serve` and `token`."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import time
from inspect import signature
from typing import Any

import pytest

import headgate_server
from headgate.policy import load_policy
from headgate.stores.redis import RedisStore
from headgate_server.cli import main
from tests.server.cli.conftest import WritePolicy

SMALLEST = '[limiters.login]\nrules = ["5/minute"]\n'


def test_check_explains_a_policy(write_policy: WritePolicy, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_policy(SMALLEST)
    for arguments in (["check"], ["check", str(file)]):
        assert main(arguments) == 0
        assert "at most 5 in any minute" in capsys.readouterr().out


def test_check_uses_environment_variables(
    write_policy: WritePolicy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_policy(SMALLEST)
    monkeypatch.setenv("HEADGATE_LIMITERS__LOGIN__RULES", '["7/hour"]')
    assert main(["check"]) == 0
    assert "at most 7 in any hour" in capsys.readouterr().out


def test_check_connects_to_stores_only_with_the_option(
    write_policy: WritePolicy, capsys: pytest.CaptureFixture[str]
) -> None:
    write_policy('[store]\nurl = "sqlite:///no-such-folder/limits.db"\n' + SMALLEST)
    assert main(["check"]) == 0
    assert main(["check", "--connect"]) == 1
    assert "no-such-folder" in capsys.readouterr().err


def test_check_reports_every_store(write_policy: WritePolicy, capsys: pytest.CaptureFixture[str]) -> None:
    write_policy(SMALLEST + '[limiters.api]\nrules = ["5/minute"]\nstore = "sqlite:///limits.db"\n')
    assert main(["check", "--connect"]) == 0
    assert capsys.readouterr().out.endswith("\n\nmemory://: can count\nsqlite:///limits.db: can count\n")


@pytest.fixture
def _patient_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a busy machine enough time to connect."""
    monkeypatch.setitem(RedisStore.__init__.__kwdefaults__, "deadline", 60.0)


@pytest.mark.usefixtures("_patient_redis")
def test_check_fails_if_a_store_cannot_count(
    write_policy: WritePolicy, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "redis://:s3cret@127.0.0.1:1/0"
    write_policy(SMALLEST + f'[limiters.api]\nrules = ["5/minute"]\nstore = "{url}"\n')
    assert main(["check", "--connect"]) == 1
    printed = capsys.readouterr()
    assert "redis://***@127.0.0.1" in printed.out
    assert "refused" in printed.out
    assert printed.err.endswith("1 of 2 stores cannot count\n")
    assert "s3cret" not in printed.out + printed.err
    assert main(["check", "--connect", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["mistake"]) == (False, None)
    memory, redis = found["stores"]
    assert memory == {"store": "memory://", "reason": None}
    assert "refused" in redis["reason"]


def test_check_reads_standard_input_and_prints_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(SMALLEST))
    assert main(["check", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["mistake"], found["warnings"]) == (True, None, [])
    assert "at most 5 in any minute" in found["words"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("[limiters.login]\nrules = [1]"))
    assert main(["check", "-", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert (found["mistake"]["line"], found["mistake"]["column"]) == (2, 10)
    assert found["mistake"]["message"].startswith("standard input:2:10: ")
    monkeypatch.setattr(sys, "stdin", io.StringIO("[limiters"))
    assert main(["check", "-"]) == 1
    assert capsys.readouterr().err.startswith("headgate: standard input:1:")


def test_check_warns_of_probable_mistakes(
    write_policy: WritePolicy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_policy(
        '[server]\nhost = "0.0.0.0"\n[limiters.none]\nrules = []\n'
        '[limiters.login]\nrules = [{ quota = "5/minute", tiers = { pro = "9/minute" } }]\ndefault_tier = "por"\n'
    )
    monkeypatch.setenv("HEADGATE_LIMITERS__LOGIN__RULS", "[]")
    monkeypatch.setenv("HEADGATE_TOKEN", "x")
    assert main(["check"]) == 0
    warnings = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("headgate: warning: ")[:44] for line in warnings] == [
        "limiter 'none' has no rules, so it admits ev",
        "limiter 'login': no rule has the default_tie",
        "[server] host = '0.0.0.0' can be reached fro",
        "environment variable HEADGATE_LIMITERS__LOGI",
    ]
    assert warnings[-1].endswith("did you mean HEADGATE_LIMITERS__LOGIN__RULES?")


# serve


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """The arguments of the server, which ends with 3 at once."""
    calls: list[tuple[Any, dict[str, Any]]] = []
    real = headgate_server.serve

    def serve(config: object, **options: object) -> int:
        signature(real).bind(config, **options)
        calls.append((config, options))
        return 3

    monkeypatch.setattr("headgate_server.serve", serve)
    return calls


def test_serve_passes_its_options_to_the_server(
    write_policy: WritePolicy, served: list[tuple[Any, dict[str, Any]]]
) -> None:
    write_policy(SMALLEST)
    assert main(["serve"]) == 3
    assert (
        main(
            [
                "serve",
                "--config",
                "headgate.toml",
                "--host",
                "::1",
                "--port",
                "0",
                "--workers",
                "4",
                "--grpc",
                "0",
            ]
        )
        == 3
    )
    assert served == [
        ("headgate.toml", {"host": None, "port": None, "workers": 1, "grpc_port": None}),
        ("headgate.toml", {"host": "::1", "port": 0, "workers": 4, "grpc_port": 0}),
    ]


def test_serve_needs_at_least_one_worker(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--workers", "0"])
    assert "argument --workers: use a number from 1 to 256, not 0" in capsys.readouterr().err


# token


@pytest.mark.parametrize(
    ("options", "may"),
    [
        ([], {"decide"}),
        (["--may", "administer"], {"administer"}),
        (["--may", "decide", "--may", "administer", "--may", "decide"], {"decide", "administer"}),
    ],
)
def test_token_prints_the_token_and_the_lines_for_the_policy_file(
    write_policy: WritePolicy, capsys: pytest.CaptureFixture[str], options: list[str], may: set[str]
) -> None:
    assert main(["token", "gateway-1", *options]) == 0
    output, error = capsys.readouterr()
    token = error.removeprefix("the token (shown only once): ").strip()
    assert len(token) >= 43
    assert token not in output
    policy = load_policy(write_policy(SMALLEST.rstrip() + output)).server.tokens[
        "gateway-1"
    ]  # without a final newline
    assert policy.sha256 == hashlib.sha256(token.encode()).hexdigest()
    assert policy.may == may


def test_a_token_expires_after_the_given_days(
    write_policy: WritePolicy, capsys: pytest.CaptureFixture[str]
) -> None:
    before = int(time.time())
    assert main(["token", "gateway", "--days", "1"]) == 0
    expires = load_policy(write_policy(SMALLEST + capsys.readouterr().out)).server.tokens["gateway"].expires
    assert expires is not None
    assert before + 86_400 <= expires <= time.time() + 86_400
    with pytest.raises(SystemExit, match="2"):
        main(["token", "gateway", "--days", "99999999"])
    output = capsys.readouterr()
    assert output.out == ""
    assert "use a number from 1 to 36500" in output.err


def test_check_warns_of_expired_tokens(write_policy: WritePolicy, capsys: pytest.CaptureFixture[str]) -> None:
    token = '[server.tokens.{0}]\nsha256 = "{0:0>64}"\nmay = ["decide"]\nexpires = {1}\n'
    write_policy(SMALLEST + token.format("1", "2001-01-31") + token.format("2", "2999-01-31T12:30:00+01:00"))
    assert main(["check"]) == 0
    [warning] = capsys.readouterr().err.splitlines()
    assert warning.startswith("headgate: warning: the token '1' has expired")


def test_tokens_differ(capsys: pytest.CaptureFixture[str]) -> None:
    main(["token", "a"])
    main(["token", "a"])
    first, second = capsys.readouterr().err.splitlines()
    assert first != second


def test_a_token_name_has_letters_digits_and_hyphens(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["token", "two words"])
    assert "use letters, digits, - and _" in capsys.readouterr().err
