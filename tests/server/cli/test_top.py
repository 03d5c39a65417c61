"""`top`: the screen, its lines, and its end."""

from __future__ import annotations

import re
from typing import Any

import pytest

from headgate_server.cli import main
from headgate_server.cli import top as top_module
from tests.server.cli.conftest import OnTerminal
from tests.server.cli.stub import Stub, events


def tick(admitted: int = 12, refused: int = 3, **changes: Any) -> dict[str, Any]:
    """Return a second in which login decided, and api did not."""
    counts = {"admitted": admitted, "refused": refused, "degraded": 0}
    return {
        "time": 1_763_251_200,
        "limiters": {"login": counts},
        "totals": {"login": counts, "api": {"admitted": 0, "refused": 0, "degraded": 0}},
        "stores": [
            {"limiter": "login", "store": "redis://***@db/0", "up": True, "breaker": "closed", "failures": 0}
        ],
        "shadow": [],
        "top": None,
        "policy_error": None,
        "workers": 1,
        "demo": None,
        "held": {"login": {"requests": 2, "tokens": 1600}, "api": {"requests": 0}},
        **changes,
    }


def once(server: Stub, capsys: pytest.CaptureFixture[str], *ticks: dict[str, Any]) -> str:
    """Return the output of `top --once` for the last tick; the others are history."""
    short = [
        {
            "time": second["time"] - ago,
            "limiters": {n: [*c.values(), 0] for n, c in second["limiters"].items()},
        }
        for ago, second in zip(range(len(ticks) - 1, 0, -1), ticks, strict=False)
    ]
    server.answers["/v1/events"] = (200, events(("history", {"ticks": short}), ("tick", ticks[-1])))
    assert main(["top", "--once", "--server", server.url]) == 0
    return capsys.readouterr().out


def test_top_shows_decisions_by_limiter_with_bars_and_history(
    server: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    output = once(server, capsys, tick(0, 0), tick(60, 0), tick(12, 3))
    assert re.search(r"^headgate top  http://127.0.0.1:\d+  \d\d:\d\d:\d\d  1 worker$", output, re.MULTILINE)
    assert re.search(r"^login +12 +3  █{16}░{4}   █▂  held: 2 requests, 1,600 tokens$", output, re.MULTILINE)
    assert re.search(r"^api +0 +0$", output, re.MULTILINE)
    assert re.search(r"^login +up +breaker closed, failures 0  redis://\*\*\*@db/0$", output, re.MULTILINE)
    assert "shadow" not in output
    assert "most refused" not in output
    assert "\x1b" not in output


def test_a_longer_tick_is_shown_per_second(server: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    output = once(server, capsys, tick(60, 0), tick(120, 1, seconds=4))
    assert re.search(r"^login +30 +0\.25  █{20}  █▅", output, re.MULTILINE)


def test_a_longer_tick_of_the_history_is_shown_per_second(
    server: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    late = {"time": 1_763_251_199, "limiters": {"login": [120, 0, 0, 0]}, "seconds": 4}
    server.answers["/v1/events"] = (200, events(("history", {"ticks": [late]}), ("tick", tick(60, 0))))
    assert main(["top", "--once", "--server", server.url]) == 0
    assert re.search(r"^login +60 +0  █{20}  ▄█", capsys.readouterr().out, re.MULTILINE)


def test_top_shows_errors(server: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    degraded = {"login": {"admitted": 1, "refused": 0, "degraded": 1}}
    down = {"limiter": "login", "store": "redis://db", "up": False, "breaker": "open", "failures": 1200}
    down |= {"reason": "\x1b refused", "since": 1_763_251_199.5}
    output = once(
        server,
        capsys,
        tick(limiters=degraded, stores=[down], policy_error="headgate.toml:2:1: \x1b bad", workers=2),
    )
    assert (
        "  2 workers\nthe policy file is invalid, the previous policy stays in force: headgate.toml:2:1: \\x1b bad\n"
        in output
    )
    assert re.search(r"^login +1 +0 .*store is down$", output, re.MULTILINE)
    assert re.search(
        r"^login +down +breaker open, failures 1,200  redis://db\n +since ..:..:59: \\x1b refused$",
        output,
        re.MULTILINE,
    )


def test_top_shows_shadow_rules_and_the_most_refused_keys(
    server: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "at most 50 in any hour for each user"
    shadow = {"limiter": "api", "rule": "candidate", "words": words, "asked": 1000, "refused": 7, "failed": 0}
    keys = [{"limiter": "l" * 30, "key": "\x1b]0;evil\x07", "refused": 120}]
    output = once(server, capsys, tick(shadow=[shadow], top=keys))
    assert re.search(rf"^api +7 of 1,000  {words}  candidate$", output, re.MULTILINE)
    assert re.search(r"^l{23}… +120  \\x1b\]0;evil\\x07$", output, re.MULTILINE)


def test_top_without_decisions(server: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no decisions yet" in once(server, capsys, tick(limiters={}, totals={}, stores=[]))


def test_without_a_terminal_each_second_is_a_line(server: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    degraded = {"login": {"admitted": 1, "refused": 0, "degraded": 1}, "\x1b": tick()["limiters"]["login"]}
    ticks = [tick(12, 3), tick(limiters=degraded), tick(limiters={}), tick(12, 3, seconds=4)]
    server.answers["/v1/events"] = (200, events(*(("tick", tick) for tick in ticks), ("news", {})))
    assert main(["top", "--server", server.url]) == 1
    output, error = capsys.readouterr()
    assert [line[10:] for line in output.splitlines()] == [
        "login 12 admitted 3 refused",
        "login 1 admitted 0 refused 1 degraded, \\x1b 12 admitted 3 refused",
        "no decisions",
        "login 12 admitted 3 refused in 4 s",
    ]
    assert error == f"headgate: {server.url} closed the connection\n"


def test_on_a_terminal_the_screen_is_redrawn_until_ctrl_c(
    server: Stub, on_terminal: OnTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers["/v1/events"] = (200, events(("tick", tick(1, 0)), ("tick", tick(2, 0))))
    pauses: list[float] = []

    def interrupt_second_pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(top_module.time, "sleep", interrupt_second_pause)
    code, output = on_terminal("top", "--server", server.url)
    assert code == 0
    screens = output.split("\x1b[H")
    assert output.startswith("\x1b[?25l")
    assert output.endswith("\x1b[?7h\x1b[?25h\n")
    # Two seconds and the end of the connection, then the same after the reconnection.
    assert len(screens) == 7
    assert "reconnecting" not in screens[2]
    assert f"{server.url} closed the connection; reconnecting" in screens[3]
    assert "reconnecting" not in screens[4]
    assert [asked.path for asked in server.asked] == ["/v1/events"] * 2


def test_lines_below_the_terminal_are_not_written(
    server: Stub, on_terminal: OnTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINES", "3")
    monkeypatch.setattr(top_module.time, "sleep", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    server.answers["/v1/events"] = (200, events(("tick", tick())))
    _, output = on_terminal("top", "--server", server.url)
    assert output.split("\x1b[H")[1].count("\n") == 2


def test_a_missing_server_is_a_failure_on_a_terminal(
    server: Stub, on_terminal: OnTerminal, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = on_terminal("top", "--server", server.url)
    assert code == 1
    assert output.endswith("\x1b[?25h\n")
    assert capsys.readouterr().err == f"headgate: {server.url} answered 404: no such path\n"


def test_events_of_another_kind_of_server_are_an_error(
    server: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers["/v1/events"] = (200, events(("tick", {"time": 1})))
    assert main(["top", "--server", server.url]) == 1
    assert "did not answer as a Headgate server does" in capsys.readouterr().err
