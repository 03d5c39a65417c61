"""Candidates: trials of other quotas for live rules."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from headgate import (
    Rule,
    calendar,
    concurrent,
    fixed_window,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.policy import AsyncLivePolicy, parse_policy
from headgate.testing import FakeClock
from headgate_server.candidates import Candidates, warm_at
from headgate_server.snapshots import Snapshot, merged
from headgate_server.wire import ShadowFigures
from tests.server.support import Server, problem

RULE = "per-minute"
LOG = '[limiters.login]\nstore = "memory://"\nrules = [{quota = "5/minute", kind = "sliding_log"}]'


async def candidate(server: Server, quota: str | None, rule: str = RULE) -> Any:
    return await server.answer("/v1/limiters/login/candidate", {"rule": rule, "quota": quota})


async def test_a_candidate_watches_and_refuses_nothing() -> None:
    server = Server()
    await server.hit(cost=5)
    assert not (await server.hit())["allowed"]
    assert await candidate(server, "3/minute") == {"limiter": "login", "rule": RULE, "quota": "3/minute"}
    server.tick(1)
    assert [(await server.hit(key="bob"))["allowed"] for _ in range(6)] == [True] * 5 + [False]
    (shadow,) = server.tick(2).shadow
    assert (shadow.limiter, shadow.candidate_for, shadow.quota) == ("login", RULE, "3/minute")
    assert (shadow.asked, shadow.refused, shadow.live_refused, shadow.admitted) == (6, 3, 1, 0)
    assert server.live.policy.limiters["login"].shadow == ()  # the policy file applies
    await candidate(server, None)
    assert server.tick(3).shadow == []


async def test_a_candidate_is_compared_from_the_moment_it_is_set() -> None:
    """Not from the next second on, in which the live rule may have refused already."""
    server = Server()
    await server.hit(cost=5)
    await candidate(server, "3/minute")
    assert not (await server.hit())["allowed"]
    (shadow,) = server.tick(1).shadow
    assert (shadow.asked, shadow.live_refused) == (1, 1)
    await candidate(server, None)
    assert not (await server.hit())["allowed"]
    await candidate(server, "3/minute")
    (shadow,) = server.tick(2).shadow
    assert (shadow.asked, shadow.live_refused) == (0, 0)


async def test_a_candidate_warms_up_and_then_counts_from_0(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000.0
    monkeypatch.setattr(time, "time", lambda: now)
    server = Server()
    await server.hit(cost=5)
    await candidate(server, "5/minute")  # as the live rule, of whose five units it knows nothing
    assert not (await server.hit())["allowed"]
    (shadow,) = server.tick(1).shadow
    assert (shadow.live_refused, shadow.admitted, shadow.warming_up_until) == (1, 1, now + 61)
    now += 61
    server.clock.advance(61)
    (shadow,) = server.tick(2).shadow
    assert (shadow.asked, shadow.live_refused, shadow.admitted) == (0, 0, 0)
    assert shadow.warming_up_until is None
    for _ in range(7):
        await server.hit()
    (shadow,) = server.tick(3).shadow
    assert (shadow.asked, shadow.refused, shadow.live_refused, shadow.admitted) == (7, 2, 2, 0)


@pytest.mark.parametrize(
    ("rule", "seconds"),
    [
        (sliding_window("5/minute"), 61),  # of 60 buckets
        (sliding_log("5/minute"), 60),
        (fixed_window("5/minute"), 20),  # the window began 40 s ago
        (token_bucket("10/s", burst=30), 3),
        (token_bucket("10/s", burst=30, tiers={"pro": "10/s burst 90"}), 9),
        (concurrent(3, lease=30), 30),
        (calendar("5/day", timezone="UTC"), 86_400 - 100),
        (sliding_window("0/minute"), 0),
    ],
    ids=str,
)
def test_a_candidate_is_warm_when_nothing_from_before_would_count(rule: Rule, seconds: int) -> None:
    begun = 86_400 * 20_000 + 100.0
    assert warm_at(rule, begun) == begun + seconds


async def test_a_reload_that_changes_a_candidate_counts_from_0() -> None:
    server = Server()
    await candidate(server, "3/minute")
    await server.hit()
    server.tick(1)
    server.live._use(
        parse_policy('[limiters.login]\nrules = [{ quota = "5/minute", tiers = { pro = "9/minute" } }]')
    )
    (shadow,) = server.tick(2).shadow
    assert shadow.asked == 0
    await server.hit()
    (shadow,) = server.tick(3).shadow
    assert shadow.asked == 1


def test_figures_of_a_worker_that_ended_before_the_warm_up_did_are_left_out() -> None:
    figures = ShadowFigures("login", "candidate", "", 4, 3, 0, candidate_for=RULE, live_refused=2)
    ended = structs.replace(figures, warming_up_until=99.0)
    tick = merged(100, [Snapshot({}, shadow=[figures])], [Snapshot({}, shadow=[ended])], 0, {})
    assert tick.shadow == [figures]


async def test_a_larger_candidate_says_what_it_would_have_admitted() -> None:
    server = Server()
    await candidate(server, "8/minute")
    server.tick(1)
    assert [(await server.hit())["allowed"] for _ in range(9)] == [True] * 5 + [False] * 4
    assert not (await server.answer("/v1/limiters/login/hold", {"key": "alice"}))["decision"]["allowed"]
    await server.answer("/v1/limiters/login/check", {"key": "alice"})
    (shadow,) = server.tick(2).shadow
    assert (shadow.asked, shadow.refused, shadow.live_refused, shadow.admitted) == (10, 2, 5, 3)


async def test_a_candidate_is_not_asked_about_what_another_rule_refuses() -> None:
    server = Server('[limiters.login]\nrules = ["2/minute", { quota = "3/hour", name = "hourly" }]')
    await candidate(server, "9/hour", "hourly")
    for _ in range(4):
        await server.hit()
    server.clock.advance(61)
    for _ in range(4):  # one more is admitted; then hourly refuses alone, and later both do
        await server.hit()
    (shadow,) = server.tick(1).shadow
    assert (shadow.asked, shadow.refused, shadow.admitted) == (6, 0, 3)


async def test_a_candidate_stays_over_a_reload_as_long_as_its_rule() -> None:
    server = Server()
    await candidate(server, "3/minute")
    server.live._use(parse_policy('[limiters.login]\nrules = ["7/minute"]'))
    assert [rule.quota.limit for rule in server.live["login"].policy.shadow] == [3]
    server.live._use(parse_policy('[limiters.login]\nrules = ["7/hour"]'))
    assert server.live["login"].policy.shadow == ()


async def test_candidate_for_an_unknown_rule_is_refused() -> None:
    server = Server()
    path = "/v1/limiters/login/candidate"
    assert "no rule 'other'" in problem(await server.post(path, {"rule": "other", "quota": "3/minute"}), 404)
    assert "fortnight" in problem(await server.post(path, {"rule": RULE, "quota": "3/fortnight"}), 422)
    assert server.tick(1).shadow == []


async def test_a_candidate_that_the_store_cannot_count_is_refused(tmp_path: Path) -> None:
    text = LOG.replace("memory://", f"sqlite:///{tmp_path}/limits.db")
    server = Server(text)
    path, rule = "/v1/limiters/login/candidate", "per-minute"
    reason = problem(await server.post(path, {"rule": rule, "quota": "1001/minute"}), 422)
    assert "at most 1000, not 1001" in reason
    server.live._use(parse_policy(text.replace("5/minute", "6/minute")))
    assert server.live["login"].policy.shadow == ()
    await server.live.aclose()


async def test_a_candidate_that_a_new_store_cannot_count_is_left_out(tmp_path: Path) -> None:
    server = Server(LOG)
    await candidate(server, "1001/minute", "per-minute")
    assert [rule.quota.limit for rule in server.live["login"].policy.shadow] == [1001]
    server.live._use(parse_policy(LOG.replace("memory://", f"sqlite:///{tmp_path}/limits.db")))
    assert server.live["login"].policy.shadow == ()
    await server.live.aclose()


async def test_workers_share_their_candidates(tmp_path: Path) -> None:
    policy = parse_policy('[limiters.login]\nrules = ["5/minute"]')
    lives = [AsyncLivePolicy(policy, clock=FakeClock()) for _ in range(2)]
    first, second = (Candidates(live, tmp_path / "candidates") for live in lives)
    second.refresh()
    first.set("login", RULE, "2/minute")
    second.refresh()
    assert [str(rule.quota) for rule in lives[1]["login"].policy.shadow] == ["2/minute"]
    assert first._watched == second._watched


async def test_a_candidate_counts_what_its_live_rule_counts() -> None:
    rules = """[limiters.login]
rules = [
  { quota = "100/minute", unit = "tokens", name = "tokens" },
  { kind = "calendar", quota = "10/month", timezone = "Europe/Berlin", name = "month" },
  { kind = "concurrent", quota = 2, lease = "60s", name = "at once" },
  { quota = "9/minute burst 3", scope = "*", name = "burst" },
]"""
    server = Server(rules)
    for rule, quota in (
        ("tokens", "50/minute"),
        ("month", "20/month"),
        ("at once", "1"),
        ("burst", "5/minute burst 2"),
    ):
        assert (await candidate(server, quota, rule))["quota"] == quota
    hold = {"key": "ann", "cost": {"tokens": 60}}
    held = [(await server.answer("/v1/limiters/login/hold", hold))["decision"]["allowed"] for _ in range(2)]
    assert held == [True, False]  # by the tokens
    shadows = {shadow.candidate_for: shadow for shadow in server.tick(1).shadow}
    assert [shadows[name].refused for name in ("tokens", "month", "at once", "burst")] == [2, 0, 0, 0]
    live = parse_policy(rules).limiters["login"].rules
    for rule in live:
        file = f"[limiters.login]\nrules = [{shadows[rule.name].toml}]"
        (put,) = parse_policy(file).limiters["login"].rules
        assert put == replace(rule, quota=put.quota)
        assert put.quota != rule.quota


async def test_a_candidate_for_places_is_not_asked_about_refused_holds() -> None:
    """No one knows how long they would have been held."""
    server = Server(
        '[limiters.login]\nrules = [{ kind = "concurrent", quota = 1, lease = "60s", name = "at once" }]'
    )
    await candidate(server, "3", "at once")
    for _ in range(4):
        await server.answer("/v1/limiters/login/hold", {"key": "ann"})
    (shadow,) = server.tick(1).shadow
    assert (shadow.asked, shadow.refused, shadow.failed, shadow.admitted) == (1, 0, 0, 0)
    path = "/v1/limiters/login/candidate"
    assert "whole numbers" in problem(await server.post(path, {"rule": "at once", "quota": "3/minute"}), 422)
