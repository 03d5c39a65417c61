"""`inspect` and `reset` through a server."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from headgate import Rule, sliding_window
from headgate.testing.servers import find_free_port
from headgate_server.cli import main
from headgate_server.describe import limiter_shown
from tests.server.cli.stub import Asked, Stub
from tests.server.loopback import limiter_policy


def limiter(name: str, store: str, *rules: Rule) -> dict[str, Any]:
    """Return a limiter as the server describes it."""
    described = limiter_shown(limiter_policy(name, rules, store=store))
    return {**msgspec.to_builtins(described), "store": store}


def count(name: str, used: int, scope: str | None = None) -> dict[str, Any]:
    times = {"reset_after": 60.0, "frees_after": 0.0}
    about = {"kind": "sliding_window", "unit": "requests", "timezone": None, "shadow": False}
    return {"name": name, "limit": 5, "used": used, "remaining": 5 - used, "scope": scope, **times, **about}


LIMITERS = {
    "limiters": [
        limiter("login", "memory://", sliding_window("5/minute", name="minute")),
        limiter(
            "a/b",
            "redis://***@db/0",
            sliding_window("5/minute", name="mine", scope="user"),
            sliding_window("5/minute", name="everyone", scope="*"),
        ),
    ]
}


@pytest.fixture(autouse=True)
def answers(server: Stub) -> None:
    """The default answers of the server."""
    server.answers = {
        "/v1/limiters": (200, LIMITERS),
        "/v1/inspect": (
            200,
            {
                "limiters": [
                    {"name": "login", "results": [count("minute", 4)], "error": None},
                    {"name": "a/b", "results": [count("mine", 1, "user")], "error": None},
                ]
            },
        ),
        "/v1/limiters/login/reset": (200, {"reset": True}),
        "/v1/limiters/a%2Fb/reset": (200, {"reset": True}),
    }


def test_inspect_sends_one_request_for_a_key(server: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "alice", "--limiter", "login", "--server", f"{server.url}/", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"limiters": [{"name": "login", "results": [count("minute", 4)], "error": None}]}
    assert server.asked == [
        Asked("GET", "/v1/limiters", None, None),
        Asked("POST", "/v1/inspect", {"key": "alice", "tier": None}, None),
    ]


def test_inspect_sends_the_scopes_of_each_limiter(server: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--scope", "user=42", "--scope", "realm=north", "--tier", "pro", "--server", server.url]
    assert main(["inspect", *arguments]) == 0
    output = capsys.readouterr().out
    assert "login  memory://\n  it counts by plain keys" in output
    assert "1/5  room now, resets in 1 min" in output
    assert [asked.body for asked in server.asked[1:]] == [{"key": {"user": "42"}, "tier": "pro"}]


def test_a_key_is_used_for_every_scope(
    server: Stub,
) -> None:
    assert main(["inspect", "alice", "--server", server.url]) == 0
    assert [asked.body["key"] for asked in server.asked[1:]] == ["alice", {"user": "alice"}]


def test_an_error_of_a_limiter_on_the_server_is_a_failure(
    server: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"name": "login", "results": [], "error": "the store is \x1b[1mdown"}
    server.answers["/v1/inspect"] = (200, {"limiters": [told]})
    assert main(["inspect", "alice", "--limiter", "login", "--server", server.url]) == 1
    assert "  the store is \\x1b[1mdown\n" in capsys.readouterr().out


def test_reset_through_a_server(server: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reset", "alice", "--yes", "--server", server.url]) == 0
    assert capsys.readouterr().out == (
        "login: reset for alice\na/b: reset for alice, and for all callers in rule everyone\n"
    )
    assert server.asked[1:] == [
        Asked("POST", "/v1/limiters/login/reset", {"key": "alice"}, None),
        Asked("POST", "/v1/limiters/a%2Fb/reset", {"key": {"user": "alice"}}, None),
    ]


# Tokens


def test_the_token_comes_from_the_environment_or_the_option(
    server: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADGATE_TOKEN", "from-the-environment")
    main(["inspect", "alice", "--server", server.url])
    main(["inspect", "alice", "--server", server.url, "--token", "given"])
    assert {asked.token for asked in server.asked} == {"Bearer from-the-environment", "Bearer given"}


def test_a_token_is_not_sent_to_a_redirect(server: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    server.answers["/v1/limiters"] = (302, "")
    assert main(["inspect", "alice", "--server", server.url, "--token", "secret"]) == 1
    assert [asked.path for asked in server.asked] == ["/v1/limiters"]
    assert "answered 302; give the store the URL of the server itself" in capsys.readouterr().err


def test_proxies_of_the_environment_are_not_used(server: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{find_free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    assert main(["inspect", "alice", "--server", server.url]) == 0


# Errors


def failing(url: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error for a server that cannot be used."""
    assert main(["inspect", "alice", "--server", url]) == 1
    error = capsys.readouterr().err
    assert error.startswith("headgate: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("body", ["", "<html>", "[]", '{"limiters": 3}', '{"limiters": [{"name": "x"}]}'])
def test_a_reply_of_another_kind_of_server_is_an_error(
    server: Stub, body: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers["/v1/limiters"] = (200, body)
    assert f"{server.url} did not answer as a Headgate server does" in failing(server.url, capsys)


def test_a_reply_without_the_limiter_is_an_error(server: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    server.answers["/v1/inspect"] = (200, {"limiters": []})
    assert main(["inspect", "alice", "--server", server.url]) == 1
    assert f"{server.url} did not answer as a Headgate server does" in capsys.readouterr().out


def test_an_unreachable_server_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://localhost:{find_free_port()}"
    assert f"{url}: " in failing(url, capsys)


@pytest.mark.parametrize("url", ["localhost:8080", "ftp://localhost", "http://"])
def test_an_invalid_url_of_a_server_is_an_error(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "alice", "--server", url]) == 2
    assert "write for example 'http://127.0.0.1:8080'" in capsys.readouterr().err
