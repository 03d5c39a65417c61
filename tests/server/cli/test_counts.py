"""`inspect` and `reset` with the stores of a policy file: SQLite files and Redis."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headgate import Limiter, SQLiteStore, sliding_window
from headgate.policy import parse_policy
from headgate_server.cli import main
from tests.server.cli.conftest import OnTerminal, WritePolicy

POLICY = """
store.url = "sqlite:///limits.db"

[limiters.login]
rules = ["5/hour", "10/day burst 20"]

[limiters.api]
rules = [
  { quota = "100/hour", scope = "user", name = "hourly", tiers = { pro = "1000/hour" } },
  { quota = "1000/day", scope = "*", name = "everyone" },
  { quota = "2/hour", scope = "user", name = "candidate", shadow = true },
]

[[limiters.api.overrides]]
key = { user = "vip" }
rules = { hourly = "5000/hour" }
"""


@pytest.fixture
def store(write_policy: WritePolicy) -> Iterator[SQLiteStore]:
    """The store of that policy."""
    write_policy(POLICY)
    with SQLiteStore("limits.db") as store:
        yield store


def limiter(store: SQLiteStore, name: str) -> Limiter:
    """Return a limiter of that policy."""
    return Limiter(*parse_policy(POLICY).limiters[name].rules, name=name, store=store)


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    """Return the result of `inspect --json`, by limiter and rule."""
    assert main(["inspect", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["limiters"]
    return {entry["name"]: {result["name"]: result for result in entry["results"]} for entry in found}


def test_inspect_shows_counts_and_charges_nothing(
    store: SQLiteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    limiter(store, "login").hit("alice", 3)
    limiter(store, "api").hit({"user": "alice"}, 50)
    for _ in range(2):
        told = inspected(capsys, "alice")
        hourly = told["login"]["per-hour"]
        assert (hourly["used"], hourly["limit"], hourly["remaining"], hourly["frees_after"]) == (3, 5, 2, 0)
        assert 3590 < hourly["reset_after"] <= 3660
        assert told["login"]["per-day"]["used"] == 3
        assert told["api"]["hourly"] == {
            **told["api"]["hourly"],
            "used": 50,
            "scope": "user",
            "shadow": False,
        }
        assert told["api"]["everyone"] == {**told["api"]["everyone"], "used": 50, "limit": 1000, "scope": "*"}
        assert told["api"]["candidate"] == {**told["api"]["candidate"], "used": 0, "shadow": True}


def test_inspect_uses_the_tier_and_overrides(store: SQLiteStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspected(capsys, "alice", "--tier", "pro")["api"]["hourly"]["limit"] == 1000
    assert inspected(capsys, "vip")["api"]["hourly"]["limit"] == 5000


def test_each_scope_has_its_key(write_policy: WritePolicy, capsys: pytest.CaptureFixture[str]) -> None:
    write_policy(
        'store.url = "sqlite:///limits.db"\n'
        "[limiters.one]\n"
        'rules = [{ quota = "5/hour", scope = "user" }]\n'
        "[limiters.two]\n"
        'rules = [{ quota = "5/hour", scope = "user" }, { quota = "9/hour", scope = "realm" }]\n'
        "[limiters.plain]\n"
        'rules = ["7/hour"]\n'
        "[limiters.all]\n"
        'rules = [{ quota = "8/hour", scope = "*" }]\n'
    )
    with SQLiteStore("limits.db") as store:
        user, realm = sliding_window("5/hour", scope="user"), sliding_window("9/hour", scope="realm")
        Limiter(user, realm, name="two", store=store).hit({"user": "42", "realm": "north"}, 2)
    both = inspected(capsys, "--scope", "user=42", "--scope", "realm=north")
    assert {rule["used"] for rule in both["two"].values()} == {2}
    assert both["plain"] == {}
    assert both["all"]["per-hour-shared"]["limit"] == 8
    assert main(["inspect", "--scope", "user=42"]) == 0
    output = capsys.readouterr().out
    assert "it also counts by realm: add --scope realm=…" in output
    assert "it counts by plain keys: use KEY instead of --scope" in output


def test_inspect_prints_a_bar_and_times_for_every_rule(
    store: SQLiteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    limiter(store, "login").hit("alice", 5)
    limiter(store, "api").hit({"user": "alice"}, 50)
    assert main(["inspect", "alice"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("alice\n\nlogin  sqlite:///limits.db\n")
    assert re.search(
        r"^  per-hour +█{20} +5/5  room in (1 h|\d\d min)[^,]*, resets in ", output, re.MULTILINE
    )
    assert re.search(r"^  hourly +█{10}░{10} +50/100  room now, resets in 1 h", output, re.MULTILINE)
    assert re.search(r"^  everyone \(shared\) +█░{19} +50/1,000  ", output, re.MULTILINE)
    assert re.search(r"^  candidate \(shadow\) +░{20} +0/2  room now, unused$", output, re.MULTILINE)
    assert "\x1b" not in output


def test_inspect_prints_units_concurrent_rules_and_calendars(
    write_policy: WritePolicy, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = parse_policy(
        write_policy(
            """
            store.url = "sqlite:///limits.db"
            [limiters.model]
            rules = [
              { quota = "1000/hour", name = "tokens", unit = "tokens" },
              { kind = "concurrent", quota = 2, lease = "1h", name = "in flight" },
              { kind = "calendar", quota = "10/year", timezone = "Europe/Berlin", name = "year" },
            ]
            """
        ).read_text()
    )
    with SQLiteStore("limits.db") as store:
        limiter = Limiter(*policy.limiters["model"].rules, name="model", store=store)
        limiter.hold("alice", {"tokens": 800})
        limiter.hold("alice", {"tokens": 200})
    assert main(["inspect", "alice"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^  tokens +█{20} +1,000/1,000 tokens  room in ", output, re.MULTILINE)
    place = r"^  in flight +█{20} +2/2 held  room in [^,]* at most, resets in .* at most$"
    assert re.search(place, output, re.MULTILINE)
    assert re.search(
        r"^  year +█{4}░{16} +2/10  room now, resets at \d{4}-01-01 00:00 Europe/Berlin$",
        output,
        re.MULTILINE,
    )


def test_inspect_is_coloured_on_a_terminal(store: SQLiteStore, on_terminal: OnTerminal) -> None:
    limiter(store, "login").hit("alice", 5)
    code, output = on_terminal("inspect", "alice")
    assert code == 0
    assert f"\x1b[31m{'█' * 20}\x1b[0m" in output


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_can_be_turned_off(
    store: SQLiteStore,
    on_terminal: OnTerminal,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
) -> None:
    monkeypatch.setenv(variable, value)
    code, output = on_terminal("inspect", "alice")
    assert (code, "\x1b" in output) == (0, False)


def test_control_characters_of_a_key_are_escaped(store: SQLiteStore, on_terminal: OnTerminal) -> None:
    code, output = on_terminal("inspect", "\x1b[2J\u202eevil\n")
    assert code == 0
    assert "\x1b[1m\\x1b[2J\\u202eevil\\n\x1b[0m" in output


def test_inspect_a_limit_of_0(write_policy: WritePolicy, capsys: pytest.CaptureFixture[str]) -> None:
    write_policy(
        'store.url = "sqlite:///limits.db"\n'
        "limiters.closed.rules = ['0/minute', { quota = '0/minute', kind = 'token_bucket' }]"
    )
    SQLiteStore("limits.db").close()
    assert main(["inspect", "alice"]) == 0
    assert capsys.readouterr().out.count("0/0  never admits anything") == 2


def test_inspect_and_reset_a_limiter_with_only_shadow_rules(
    write_policy: WritePolicy, capsys: pytest.CaptureFixture[str]
) -> None:
    write_policy(
        'store.url = "sqlite:///limits.db"\n'
        "limiters.new.rules = [{ quota = '5/minute', name = 'candidate', shadow = true }]"
    )
    SQLiteStore("limits.db").close()
    assert inspected(capsys, "alice")["new"]["candidate"]["shadow"] is True
    assert main(["reset", "alice", "--yes"]) == 0


def test_counts_in_memory_are_not_visible(
    write_policy: WritePolicy, capsys: pytest.CaptureFixture[str]
) -> None:
    write_policy(
        'limiters.a.rules = ["5/minute"]\nlimiters.b = { rules = ["1/s"], store = "sqlite:///:memory:" }'
    )
    assert main(["inspect", "alice"]) == 1
    assert capsys.readouterr().out.count("add --server") == 2
    assert main(["reset", "alice", "--yes"]) == 1
    assert capsys.readouterr().out.count("not reset: it counts in the memory") == 2


def test_inspect_does_not_create_a_database(
    write_policy: WritePolicy, capsys: pytest.CaptureFixture[str]
) -> None:
    write_policy(POLICY)
    assert main(["inspect", "alice"]) == 1
    assert f"there is no file {Path('limits.db').absolute()}" in capsys.readouterr().out
    assert not Path("limits.db").exists()


def test_an_unreachable_store_is_reported_and_the_others_are_shown(
    store: SQLiteStore, write_policy: WritePolicy, capsys: pytest.CaptureFixture[str]
) -> None:
    write_policy(POLICY + "[limiters.far]\nrules = ['1/s']\nstore = 'redis://ada:s3cret@127.0.0.1:1'\n")
    limiter(store, "login").hit("alice", 5)
    assert main(["inspect", "alice"]) == 1
    output = capsys.readouterr().out
    assert "5/5" in output
    assert "far  redis://***@127.0.0.1:1" in output
    assert "127.0.0.1:1/0: Error" in output
    assert main(["reset", "alice", "--yes"]) == 1
    output = capsys.readouterr().out
    assert "login: reset for alice\n" in output
    assert "far: not reset: " in output
    assert "s3cret" not in output


@pytest.mark.parametrize("arguments", [[], ["alice", "--scope", "user=42"]])
def test_either_a_key_or_scopes_are_required(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", *arguments]) == 2
    assert capsys.readouterr().err == "headgate: give either KEY or --scope, as in --scope user=42\n"


def test_a_scope_needs_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["inspect", "--scope", "user"])
    assert "write a scope as user=42, not 'user'" in capsys.readouterr().err


def test_the_error_for_an_unknown_limiter_lists_the_limiters(
    write_policy: WritePolicy, capsys: pytest.CaptureFixture[str]
) -> None:
    write_policy(POLICY)
    assert main(["inspect", "alice", "--limiter", "logn"]) == 1
    assert capsys.readouterr().err == "headgate: unknown limiter 'logn'; use one of 'login', 'api'\n"


# reset


def test_reset_deletes_the_counts_of_one_key(store: SQLiteStore, capsys: pytest.CaptureFixture[str]) -> None:
    login = limiter(store, "login")
    login.hit("alice", 5)
    login.hit("bob", 5)
    assert main(["reset", "alice", "--limiter", "login", "--yes"]) == 0
    assert capsys.readouterr().out == "login: reset for alice\n"
    assert login.check("alice", 5)
    assert not login.check("bob")


def test_reset_includes_shadow_rules_and_shared_rules(
    store: SQLiteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    api = parse_policy(POLICY).limiters["api"]
    shadow = Limiter(*api.shadow, name="api", store=store)
    shadow.hit({"user": "alice"}, 2)
    limiter(store, "api").hit({"user": "bob"}, 9)
    assert main(["reset", "--scope", "user=alice", "--limiter", "api", "--yes"]) == 0
    assert capsys.readouterr().out == "api: reset for user=alice, and for all callers in rule everyone\n"
    assert shadow.check({"user": "alice"}, 2)
    told = inspected(capsys, "bob")["api"]
    assert (told["hourly"]["used"], told["everyone"]["used"]) == (9, 0)


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("yes ", 0), ("", 1), ("n", 1), (None, 1)])
def test_reset_asks_for_confirmation_on_a_terminal(
    store: SQLiteStore,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str | None,
    code: int,
) -> None:
    login = limiter(store, "login")
    login.hit("alice", 5)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    asked: list[str] = []

    def reply(prompt: str) -> str:
        asked.append(prompt)
        if answer is None:
            raise EOFError
        return answer

    monkeypatch.setattr("builtins.input", reply)
    assert main(["reset", "alice"]) == code
    assert asked == ["Continue? [y/N] "]
    output = capsys.readouterr().out
    assert "Delete the counts of alice in: login, api\n" in output
    assert "Delete the counts of all callers in: api, rule everyone\n" in output
    assert ("nothing was reset" in output) == (code == 1)
    assert bool(login.check("alice", 5)) == (code == 0)


def test_reset_without_a_terminal_requires_yes(
    store: SQLiteStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    login = limiter(store, "login")
    login.hit("alice", 5)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False))
    assert main(["reset", "alice"]) == 2
    assert "add --yes" in capsys.readouterr().err
    assert not login.check("alice")


# Redis
