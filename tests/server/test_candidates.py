"""Candidates: what a live rule would do with another quota."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headgate.policy import AsyncLivePolicy, parse_policy
from headgate.testing import FakeClock
from headgate_server.candidates import Candidates
from tests.server.support import Server, problem

RULE = "sliding_window/1m"


async def candidate(server: Server, quota: str | None, rule: str = RULE) -> Any:
    return await server.answer("/v1/limiters/login/candidate", {"rule": rule, "quota": quota})


async def test_a_candidate_watches_and_refuses_nothing() -> None:
    server = Server()
    await server.hit(cost=5)
    assert not (await server.hit())["allowed"]
    assert await candidate(server, "3/minute") == {"limiter": "login", "rule": RULE, "quota": "3/minute"}
    server.statistics.tick(server.live, 1)
    assert [(await server.hit(key="bob"))["allowed"] for _ in range(6)] == [True] * 5 + [False]
    (shadow,) = server.statistics.tick(server.live, 2).shadow
    assert (shadow.limiter, shadow.candidate_for, shadow.quota) == ("login", RULE, "3/minute")
    assert (shadow.asked, shadow.refused, shadow.live_refused, shadow.admitted) == (6, 3, 1, 0)
    assert server.live.policy.limiters["login"].shadow == ()  # what is in force is what the file says
    await candidate(server, None)
    assert server.statistics.tick(server.live, 3).shadow == []


async def test_a_larger_candidate_says_what_it_would_have_admitted() -> None:
    server = Server()
    await candidate(server, "8/minute")
    server.statistics.tick(server.live, 1)
    assert [(await server.hit())["allowed"] for _ in range(9)] == [True] * 5 + [False] * 4
    assert not (await server.answer("/v1/limiters/login/hold", {"key": "alice"}))["decision"]["allowed"]
    await server.answer("/v1/limiters/login/check", {"key": "alice"})
    (shadow,) = server.statistics.tick(server.live, 2).shadow
    assert (shadow.asked, shadow.refused, shadow.live_refused, shadow.admitted) == (10, 2, 5, 3)


async def test_a_candidate_is_not_asked_about_what_another_rule_refuses() -> None:
    server = Server('[limiters.login]\nrules = ["2/minute", { quota = "3/hour", name = "hourly" }]')
    await candidate(server, "9/hour", "hourly")
    for _ in range(4):
        await server.hit()
    server.clock.advance(61)
    for _ in range(4):  # one more is admitted; then hourly refuses alone, and later both do
        await server.hit()
    (shadow,) = server.statistics.tick(server.live, 1).shadow
    assert (shadow.asked, shadow.refused, shadow.admitted) == (6, 0, 3)


async def test_a_candidate_stays_over_a_reload_as_long_as_its_rule() -> None:
    server = Server()
    await candidate(server, "3/minute")
    server.live._use(parse_policy('[limiters.login]\nrules = ["7/minute"]'))
    assert [rule.quota.limit for rule in server.live["login"].policy.shadow] == [3]
    server.live._use(parse_policy('[limiters.login]\nrules = ["7/hour"]'))
    assert server.live["login"].policy.shadow == ()


async def test_a_candidate_for_nothing_is_said_so() -> None:
    server = Server()
    path = "/v1/limiters/login/candidate"
    assert "no rule 'other'" in problem(await server.post(path, {"rule": "other", "quota": "3/minute"}), 404)
    assert "fortnight" in problem(await server.post(path, {"rule": RULE, "quota": "3/fortnight"}), 422)
    assert server.statistics.tick(server.live, 1).shadow == []


async def test_workers_share_their_candidates(tmp_path: Path) -> None:
    policy = parse_policy('[limiters.login]\nrules = ["5/minute"]')
    lives = [AsyncLivePolicy(policy, clock=FakeClock()) for _ in range(2)]
    first, second = (Candidates(live, tmp_path / "candidates") for live in lives)
    second.refresh()
    first.set("login", RULE, "2/minute")
    second.refresh()
    assert [str(rule.quota) for rule in lives[1]["login"].policy.shadow] == ["2/minute"]
