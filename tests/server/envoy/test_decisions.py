"""Decisions for Envoy: which rules decide, what is charged, and what the answer contains."""

from __future__ import annotations

import pytest

from headgate import Hook
from headgate.observe import Call
from headgate.policy import PolicyError, parse_policy
from headgate_server.envoy.messages import OK, OVER_LIMIT
from headgate_server.envoy.parts import rounded_deadline
from tests.server.envoy.asking import Service, codes, fields, left, policy_with, request

TWO = policy_with(
    '{ key = "client", scope = "client" }, { key = "path", scope = "path" }',
    '{ quota = "5/minute", scope = "client" }, { quota = "3/minute", scope = "path" }',
)


class Calls(Hook):
    """Counts the calls of limiters."""

    def __init__(self) -> None:
        self.operations: list[str] = []

    def decided(self, call: Call, decision: object, seconds: float) -> None:
        self.operations.append(call.operation)


async def test_counts_do_not_depend_on_the_combination() -> None:
    service = Service(TWO)
    assert await service.admits({"path": "/"})
    assert await service.admits({"path": "/"}, {"client": "a"})
    assert left(await service.ask({"client": "b"}, {"path": "/"})) == [4, 0]


async def test_several_descriptors_are_one_call_of_the_store() -> None:
    calls = Calls()
    service = Service(TWO, hooks=[calls])
    await service.ask({"client": "a"}, {"path": "/"}, {"unknown": "x"})
    assert calls.operations == ["hit"]


async def test_independent_domain_charges_what_it_admits() -> None:
    service = Service(
        TWO + "[envoy.domains.apart]\nlimiter = 'edge'\natomic = false\ndescriptors = [\n"
        '  { key = "client", scope = "client" }, { key = "path", scope = "path" }]\n'
    )
    for _ in range(5):
        response = await service.decisions.decide(request({"client": "a"}, {"path": "/"}, domain="apart"))
    assert codes(response) == [OK, OVER_LIMIT]
    assert not await service.admits({"client": "a"})


async def test_status_has_limit_remaining_and_reset() -> None:
    service = Service(TWO)
    response = await service.ask({"client": "a"}, {"unknown": "b"}, {"path": "/"})
    assert codes(response) == [OK, OK, OK]
    first, unknown, second = response.statuses
    assert (first.current_limit.requests_per_unit, first.current_limit.unit) == (5, 2)
    assert (first.limit_remaining, second.limit_remaining) == (4, 2)
    assert 60 <= first.duration_until_reset.seconds <= 61
    assert not unknown.HasField("current_limit")


async def test_refusal_says_when_to_retry() -> None:
    service = Service(policy_with('{ key = "user", scope = "user" }'))
    assert await service.admitted(4, {"user": "a"}) == 3
    status = (await service.ask({"user": "a"})).statuses[0]
    wait = status.duration_until_reset
    service.clock.advance(wait.seconds + (wait.nanos - 1_000) / 1e9)
    assert not await service.admits({"user": "a"})
    service.clock.advance(1e-6)
    assert await service.admits({"user": "a"})


async def test_header_fields_are_those_of_the_http_edges() -> None:
    service = Service(policy_with('{ key = "user", scope = "user" }'))
    assert fields(await service.ask({"user": "a"}))["ratelimit"] == '"per-minute-user";r=2;t=61'
    assert await service.admitted(3, {"user": "a"}) == 2
    refused = fields(await service.ask({"user": "a"}))
    assert refused["retry-after"] == "61"
    assert refused["ratelimit-policy"] == '"per-minute-user";q=3;w=60'
    assert refused["x-ratelimit-remaining"] == "0"


async def test_unknown_domain_and_descriptor_are_ok() -> None:
    service = Service(TWO)
    assert codes(await service.ask({"other": "x"}, {})) == [OK, OK]
    assert codes(await service.decisions.decide(request({"client": "a"}, domain="none"))) == [OK]
    assert codes(await service.ask()) == []


# Costs


@pytest.mark.parametrize("hits", [6, 2**32 - 1])
async def test_cost_above_capacity_is_over_limit(hits: int) -> None:
    service = Service(TWO)
    response = await service.ask({"client": "a", "hits": 2**64 - 1 if hits > 6 else hits}, {"path": "/"})
    assert codes(response) == [OVER_LIMIT, OK]
    assert response.statuses[0].current_limit.requests_per_unit == 5
    assert await service.admitted(5, {"client": "a"}, {"path": "/"}) == 3


# Descriptors


async def test_nested_values_and_wildcards() -> None:
    service = Service(
        policy_with(
            """
  { key = "plan", value = "free", descriptors = [{ key = "user", scope = "free_user" }] },
  { key = "plan", value = "pro*", scope = "pro" },
  { key = "plan", value = "team*", shared = true, scope = "team" },
  { key = "plan", value = "vip", unlimited = true },
  { key = "plan", scope = "other" },
""",
            ", ".join(
                f'{{ quota = "1/minute", scope = "{scope}" }}'
                for scope in ("free_user", "pro", "team", "other")
            ),
        )
    )
    assert await service.admitted(2, {"plan": "free", "user": "a"}) == 1
    assert await service.admitted(2, {"plan": "free", "user": "b"}) == 1
    assert await service.admitted(2, {"plan": "free"}) == 2  # no rule at this node
    assert await service.admitted(2, {"plan": "free", "user": "a", "more": "x"}) == 2  # longer than the tree
    assert await service.admitted(2, {"plan": "pro1"}) == 1
    assert await service.admitted(2, {"plan": "pro2"}) == 1
    assert await service.admitted(2, {"plan": "team1"}) == 1
    assert await service.admitted(2, {"plan": "team2"}) == 0  # counted together with team1
    assert await service.admitted(2, {"plan": "vip"}) == 2
    assert await service.admitted(2, {"plan": "x"}) == 1


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        ("/api*v1", ("/apiv1", "/api/x/v1"), ("/apiv", "/api/v1/", "api/v1")),
        ("svc*ep*rpc", ("svceprpc", "svc-ep-ep-rpc"), ("svcrpc", "svcep", "svceerpc")),
        ("aba*ba", ("ababa", "abacba"), ("aba", "abba")),
        ("*", ("", "x"), ()),
        ("*x", ("x", "ax"), ("xa", "")),
    ],
)
async def test_wildcards_fit_anywhere(
    pattern: str, fitting: tuple[str, ...], others: tuple[str, ...]
) -> None:
    rules = '{ quota = "0/minute", scope = "user" }'
    service = Service(policy_with(f'{{ key = "a", value = "{pattern}", scope = "user" }}', rules))
    for value in (*fitting, *others):
        assert await service.admits({"a": value}) is (value in others), value


async def test_different_values_are_different_keys() -> None:
    service = Service(
        policy_with(
            '{ key = "a", descriptors = [{ key = "b", scope = "user" }] }',
            '{ quota = "1/minute", scope = "user" }',
        )
    )
    for a, b in (("x|y", "z"), ("x", "y|z"), ("x%7Cy", "z"), ("", ""), ("x", "y")):
        assert await service.admitted(2, {"a": a, "b": b}) == 1


async def test_key_is_that_of_other_callers() -> None:
    service = Service(policy_with('{ key = "user", scope = "user" }'))
    await service.live["edge"].hit({"user": "alice"}, 3)
    assert not await service.admits({"user": "alice"})


async def test_replaced_scope_does_not_decide() -> None:
    service = Service(
        policy_with(
            '{ key = "user", scope = "user" }, { key = "vip", scope = "vip", replaces = ["user"] }',
            '{ quota = "1/minute", scope = "user" }, { quota = "3/minute", scope = "vip" }',
        )
    )
    assert await service.admitted(4, {"user": "a"}, {"vip": "a"}) == 3
    assert await service.admits({"user": "a"})


async def test_shadow_rule_counts_and_admits() -> None:
    service = Service(
        policy_with(
            '{ key = "user", scope = "user" }, { key = "trial", scope = "trial" }',
            '{ quota = "5/minute", scope = "user" }, { quota = "2/minute", scope = "trial", shadow = true }, '
            '{ quota = "1/minute", scope = "user", name = "candidate", shadow = true }',
        )
    )
    assert await service.admitted(4, {"user": "a"}, {"trial": "a", "hits": 2}) == 4
    counts = {shadow.rule.name: shadow.tally.so_far() for shadow in service.live["edge"].current.shadows}
    assert (counts["per-minute-trial"].asked, counts["per-minute-trial"].refused) == (4, 3)
    assert (counts["candidate"].asked, counts["candidate"].refused) == (4, 3)


async def test_recorded_units_count_beyond_the_limit() -> None:
    service = Service(
        policy_with(
            '{ key = "tokens", scope = "tokens" }, { key = "used", scope = "tokens", record = true }',
            '{ quota = "100/minute", scope = "tokens" }',
        )
    )
    assert await service.admits({"tokens": "a", "hits": 0})
    assert codes(await service.ask({"used": "a"}, hits=250)) == [OK]
    assert not await service.admits({"tokens": "a", "hits": 0})
    service.clock.advance(61)
    assert await service.admits({"tokens": "a", "hits": 0})


# Overrides


async def test_limit_of_a_descriptor_is_the_quota_of_the_call() -> None:
    service = Service(policy_with('{ key = "user", scope = "user" }'))
    assert await service.admitted(9, {"user": "a", "limit": (7, 2)}) == 7
    response = await service.ask({"user": "a", "limit": (9, 2)})
    assert response.statuses[0].current_limit.requests_per_unit == 9
    assert response.statuses[0].limit_remaining == 1
    assert not await service.admits({"user": "a"})  # the same counts


async def test_limit_with_another_unit_has_its_own_state() -> None:
    service = Service(policy_with('{ key = "user", scope = "user" }'))
    assert await service.admitted(9, {"user": "a", "limit": (4, 4)}) == 4
    response = await service.ask({"user": "a", "limit": (4, 4)})
    assert (response.statuses[0].current_limit.unit, codes(response)) == (4, [OVER_LIMIT])
    assert await service.admitted(9, {"user": "a"}) == 3


async def test_limit_of_a_descriptor_does_not_replace_a_penalty() -> None:
    penalty = '{ kind = "penalty", quota = "2/h", scope = "user" }'
    service = Service(
        policy_with(
            '{ key = "user", scope = "user" }', f'{{ quota = "3/minute", scope = "user" }}, {penalty}'
        )
    )
    assert await service.admitted(9, {"user": "a", "limit": (4, 3)}) == 4
    response = await service.ask({"user": "a", "limit": (9, 3)})
    assert (codes(response), response.statuses[0].current_limit.requests_per_unit) == ([OVER_LIMIT], 2)
    assert not await service.admits({"user": "a"})


async def test_limit_of_unknown_unit_is_ignored() -> None:
    service = Service(policy_with('{ key = "user", scope = "user" }'))
    assert await service.admitted(9, {"user": "a", "limit": (4, 0)}) == 3


async def test_tiers_and_overrides_of_the_policy_apply() -> None:
    service = Service(
        policy_with(
            '{ key = "user", scope = "user" }',
            '{ quota = "3/minute", scope = "user", tiers = { free = "1/minute" } }',
            "[[limiters.edge.overrides]]\nkey = { user = 'boss' }\nrules = { per-minute-user = '6/minute' }\n",
        ).replace("rules = [", 'default_tier = "free"\nrules = [', 1)
    )
    response = await service.ask({"user": "a"})
    assert response.statuses[0].current_limit.requests_per_unit == 1
    assert fields(response)["ratelimit-policy"] == '"per-minute-user";q=1;w=60'
    assert await service.admitted(9, {"user": "boss"}) == 6
    assert (await service.ask({"user": "boss"})).statuses[0].current_limit.requests_per_unit == 6


async def test_penalty_counts_the_refusals_of_its_scope() -> None:
    rules = (
        '{ quota = "2/minute", scope = "user" }, { kind = "penalty", quota = "3/15 minutes", scope = "user" }'
    )
    service = Service(policy_with('{ key = "user", scope = "user" }', rules))
    assert await service.admitted(5, {"user": "a"}) == 2
    assert await service.admitted(4, {"user": "b", "limit": (1, 2)}) == 1
    service.clock.advance(120)
    for asked in ({"user": "a"}, {"user": "b", "limit": (9, 2)}, {"user": "b", "limit": (9, 4)}):
        response = await service.ask(asked)
        assert codes(response) == [OVER_LIMIT]
        assert response.statuses[0].current_limit.name == "penalty-user"
        assert 700 < response.statuses[0].duration_until_reset.seconds < 900
    service.clock.advance(900)
    assert await service.admits({"user": "a"})


# Failures and reloads


@pytest.mark.parametrize(
    ("remaining", "seconds"),
    [
        (None, None),
        (60, None),
        (0.25, 0.2),
        (0.202, 0.2),
        (0.2019, 0.15),
        (0.02, 0.015),
        (0.001, 0.005),
        (-1, 0.005),
    ],
)
def test_store_gets_a_little_less_than_the_deadline(remaining: float | None, seconds: float | None) -> None:
    assert rounded_deadline(remaining) == seconds


@pytest.mark.parametrize(("policy", "code"), [("open", OK), ("closed", OVER_LIMIT)])
async def test_unexpected_error_is_answered_by_the_failure_policy(
    policy: str, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service(TWO.replace("rules", f'on_store_error = "{policy}"\nrules', 1))

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("headgate_server.envoy.matching.Matcher.plan", fail)
    for _ in range(3):
        assert codes(await service.ask({"client": "a"})) == [code]
    assert [record.getMessage() for record in caplog.records] == [
        "requests of Envoy to limiter 'edge' fail: ZeroDivisionError: "
    ]


@pytest.mark.parametrize(("policy", "code"), [("open", OK), ("closed", OVER_LIMIT)])
async def test_store_that_is_down_is_answered_by_the_failure_policy(policy: str, code: int) -> None:
    text = TWO.replace("rules", f'store = "redis://127.0.0.1:1"\non_store_error = "{policy}"\nrules', 1)
    service = Service(text)
    try:
        response = await service.ask({"client": "a"}, {"path": "/"}, remaining=0.1)
        assert codes(response) == [code, code]
    finally:
        await service.live.aclose()


@pytest.mark.parametrize(
    ("descriptors", "rules", "reason"),
    [
        (
            '{ key = "a", scope = "b" }',
            '{ quota = "1/s", scope = "u" }',
            "no rule of the limiter has the scope 'b'",
        ),
        ('{ key = "a", scope = "u" }', '"1/s"', "needs a scope that descriptors can name"),
        (
            '{ key = "a", scope = "u" }',
            '{ quota = "1/s", scope = "*" }',
            "needs a scope that descriptors can name",
        ),
        (
            '{ key = "a", scope = "u" }',
            '{ kind = "concurrent", quota = 1, lease = "1s", scope = "u" }',
            "Envoy does not report the end",
        ),
        (
            '{ key = "a" }',
            '{ quota = "1/s", scope = "u" }',
            "a descriptor needs a scope, unlimited = true, or nested",
        ),
        ("", '{ quota = "1/s", scope = "u" }', "a domain needs descriptors"),
        (
            '{ key = "a", scope = "u", unlimited = true }',
            '{ quota = "1/s", scope = "u" }',
            "leave out the scope",
        ),
        ('{ key = "a", record = true }', '{ quota = "1/s", scope = "u" }', "record needs a scope"),
        ('{ key = "a", scope = "u", replaces = ["x"] }', '{ quota = "1/s", scope = "u" }', "the scope 'x'"),
        ('{ key = "a", scope = "u", replaces = ["u"] }', '{ quota = "1/s", scope = "u" }', "replace itself"),
        ('{ key = "a", scope = "u", rate = 1 }', '{ quota = "1/s", scope = "u" }', "unknown key 'rate'"),
        (
            '{ key = "a", scope = "u" }, { key = "a", scope = "u" }',
            '{ quota = "1/s", scope = "u" }',
            "same key and value",
        ),
        (
            '{ key = "a", scope = "u", descriptors = [{ key = "b", scope = "u" }] }',
            '{ quota = "1/s", scope = "u" }',
            "different numbers of counted values",
        ),
    ],
)
def test_invalid_domain_is_an_error(descriptors: str, rules: str, reason: str) -> None:
    with pytest.raises(PolicyError, match=reason) as error:
        parse_policy(policy_with(descriptors, rules))
    assert error.value.line is not None


def test_domain_needs_an_existing_limiter() -> None:
    text = policy_with('{ key = "user", scope = "user" }').replace("domains.edge", "domains.web")
    with pytest.raises(PolicyError, match="there is no limiter 'web'; the limiters are 'edge'"):
        parse_policy(text)
    with pytest.raises(PolicyError, match="no domains"):
        parse_policy('[limiters.a]\nrules = ["1/s"]\n[envoy]\nport = 1\n')
