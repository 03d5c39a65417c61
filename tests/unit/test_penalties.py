"""Penalties in limiters, policies, header fields and failure policies; the conformance kit tests them on every store."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headgate import (
    AsyncLimiter,
    ConfigError,
    Limiter,
    MemoryStore,
    Quota,
    RateLimited,
    StoreUnavailable,
    concurrent,
    local,
    penalty,
    sliding_log,
)
from headgate.client.wire import read_limiter
from headgate.decision import Decision
from headgate.http.headers import Writer
from headgate.outage.breaker import Breaker
from headgate.outage.fallback import FallbackLimiter
from headgate.policy import PolicyError, explain, parse_policy
from headgate.rules import make_rule
from headgate.stores.request import Request
from headgate.testing import FakeClock
from headgate.usage import usage_of, with_unreachable_limits
from tests.unit.flavours import done

Flavour = type[Limiter] | type[AsyncLimiter]
both = pytest.mark.parametrize("flavour", [Limiter, AsyncLimiter])


def refusals(limiter: Any) -> int:
    """Return the refusals that the penalty of a limiter in memory has counted."""
    states = limiter.store._counters.states()
    return next((state[2] for (place, _), state in states.items() if place[1].startswith("penalty")), 0)


# --- Rules ------------------------------------------------------------------------------------------------------------


def test_a_penalty_has_a_name_a_quota_and_a_text() -> None:
    rule = penalty("15 minutes", after=3, growth=2, longest="1 day", scope="user")
    assert (rule.name, rule.quota, rule.growth, rule.longest_us) == (
        "penalty-user",
        Quota(3, 900_000_000),
        2,
        86_400_000_000,
    )
    assert str(rule) == "penalty-user (3/15m)"


def test_a_changed_number_of_refusals_keeps_the_state_and_other_changes_do_not() -> None:
    identity = penalty("15m", after=3).identity
    assert identity == penalty("15m", after=4).identity
    assert identity != penalty("10m", after=3).identity
    assert identity != penalty("15m", after=3, growth=2, longest="1d").identity


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"after": 0}, r"at least 1, as in penalty\('15m', after=3\), not 0"),
        ({"after": -1}, "after= .* not -1"),
        ({"after": 1.5}, "whole number of refusals"),
        ({"after": 3, "growth": 2}, "belong together"),
        ({"after": 3, "longest": "1 day"}, "belong together"),
        (
            {"after": 3, "growth": 2, "longest": "1 minute"},
            "penalty, 1m, cannot be shorter than the first one, 15m",
        ),
        ({"after": 3, "growth": 101, "longest": "1 day"}, "growth"),
    ],
)
def test_arguments_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        penalty("15 minutes", **options)


def test_a_penalty_has_no_unit() -> None:
    with pytest.raises(ConfigError, match="counts refusals"):
        make_rule("penalty", "3/15m", unit="tokens")


@pytest.mark.parametrize(
    "rules",
    [
        (penalty("15m", after=3),),
        (concurrent(3, lease="1m"), penalty("15m", after=3)),
        (sliding_log("3/m", scope="user"), penalty("15m", after=3, scope="place")),
    ],
)
def test_a_penalty_needs_a_rate_of_its_scope(rules: Any) -> None:
    with pytest.raises(ConfigError, match="there is none"):
        Limiter(*rules)


def test_a_penalty_is_among_at_most_40_rules() -> None:
    rules = [sliding_log("3/m", name=str(number)) for number in range(40)]
    assert Limiter(*rules[:39], penalty("15m", after=3)).hit("a")
    with pytest.raises(ConfigError, match="at most 40"):
        Limiter(*rules, penalty("15m", after=3))


def test_a_penalty_cannot_be_leased() -> None:
    with pytest.raises(ConfigError, match="cannot be leased"):
        Limiter("9/h", penalty("1d", after=3), name="login", store="sqlite:///:memory:", lease="1s")


# --- Calls that wait --------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("call", ["wait", "hold"])
async def test_a_call_that_waits_in_vain_counts_once(flavour: Flavour, call: str) -> None:
    limiter = flavour(sliding_log("1/m"), penalty("15m", after=2), clock=FakeClock())
    await done(limiter.hit("a"))
    with pytest.raises(RateLimited):
        await done(getattr(limiter, call)("a", timeout=30))
    assert refusals(limiter) == 1
    with pytest.raises(RateLimited) as refused:
        await done(getattr(limiter, call)("a", timeout=30))
    assert refused.value.decision.denied_by == "penalty"


@both
@pytest.mark.parametrize("call", ["wait", "hold"])
async def test_attempts_of_a_call_that_is_admitted_in_time_do_not_count(flavour: Flavour, call: str) -> None:
    limiter = flavour(sliding_log("1/m"), penalty("15m", after=1), clock=FakeClock())
    await done(limiter.hit("a"))
    assert await done(getattr(limiter, call)("a", timeout=60))
    assert refusals(limiter) == 0


@both
async def test_a_call_may_wait_for_the_end_of_a_penalty(flavour: Flavour) -> None:
    clock = FakeClock()
    limiter = flavour(sliding_log("1/m"), penalty("15m", after=1), clock=clock)
    await done(limiter.hit("a"))
    assert not await done(limiter.hit("a"))
    began = clock.now_us()
    assert await done(limiter.wait("a", timeout=901))
    assert clock.now_us() - began == 900_000_000


async def test_a_call_that_gives_up_in_the_queue_counts_only_if_it_would_be_refused() -> None:
    limiter = AsyncLimiter(concurrent(1, lease="1h"), sliding_log("9/h"), penalty("15m", after=1))
    async with limiter.hold("a"):
        first = asyncio.create_task(limiter.wait("a"))
        await asyncio.sleep(0)
        with pytest.raises(RateLimited):
            await limiter.wait("a", timeout=0.001)
        assert refusals(limiter) == 0
        first.cancel()


# --- Holds that take units at their confirmation ----------------------------------------------------------------------


@both
async def test_a_refused_confirmation_of_a_hold_without_units_does_not_count(flavour: Flavour) -> None:
    limiter = flavour(sliding_log("1/m"), penalty("15m", after=1), clock=FakeClock())
    hold = await done(limiter.hold("a", 0))
    await done(limiter.record("a", 1))
    for _ in range(3):
        assert (await done(hold.confirm(1))).denied_by == "per-minute"
    assert refusals(limiter) == 0


# --- The overflow state -----------------------------------------------------------------------------------------------


def test_a_full_memory_store_punishes_no_strangers() -> None:
    store = MemoryStore(max_keys=2, clock=FakeClock())
    limiter = Limiter(sliding_log("1/m"), penalty("15m", after=1), name="login", store=store)
    limiter.hit("known")
    assert limiter.hit("known").denied_by == "penalty"
    for stranger in ("one", "two", "three"):
        assert limiter.hit(stranger).denied_by in (None, "per-minute")
    assert limiter.hit("known").denied_by == "penalty"


def test_a_penalty_refuses_in_a_full_memory_store_after_its_rate_has_expired() -> None:
    clock = FakeClock()
    store = MemoryStore(max_keys=2, clock=clock)
    limiter = Limiter(sliding_log("1/m"), penalty("15m", after=1), name="login", store=store)
    limiter.hit("known")
    assert limiter.hit("known").denied_by == "penalty"
    clock.advance(120)
    assert limiter.hit("known").denied_by == "penalty"
    clock.advance(780)
    assert limiter.hit("known")


def test_refusals_by_an_overflow_state_do_not_count() -> None:
    """Strangers have used it up, and there is room for the penalty, because other states have expired."""
    clock = FakeClock()
    store = MemoryStore(max_keys=2, clock=clock)
    brief = Limiter(sliding_log("1/s"), name="brief", store=store)
    limiter = Limiter(sliding_log("1/m"), penalty("15m", after=1), name="login", store=store)
    assert all([brief.hit("one"), brief.hit("two"), limiter.hit("stranger")])
    clock.advance(2)
    assert [limiter.hit("new").denied_by for _ in range(2)] == ["per-minute"] * 2
    assert refusals(limiter) == 0


def test_a_penalty_needs_no_room_for_an_admission() -> None:
    store = MemoryStore(max_keys=2, clock=FakeClock())
    limiter = Limiter(penalty("15m", after=1), sliding_log("2/m"), name="login", store=store)
    assert [bool(limiter.hit(key)) for key in ("one", "two", "one", "two")] == [True] * 4
    assert store.overflowed == 0


# --- A store that is down ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["open", "closed", local(share=0.5)])
def test_answers_of_the_failure_policy_do_not_count(policy: Any) -> None:
    rules = (sliding_log("2/m"), penalty("15m", after=1))
    fallback = FallbackLimiter("login", rules, policy, Breaker("store"))
    answers: list[Decision] = [
        fallback.decide(Request("hit", "a"), StoreUnavailable("it is gone"))[0] for _ in range(4)
    ]
    assert {answer.denied_by for answer in answers} <= {None, "per-minute"}
    assert all(answer.results[1].allowed for answer in answers)


# --- Usage and header fields ------------------------------------------------------------------------------------------


def test_usage_shows_the_refusals_and_the_end() -> None:
    store, rules = MemoryStore(clock=FakeClock()), (sliding_log("1/m"), penalty("15m", after=3))
    limiter = Limiter(*rules, name="login", store=store)
    reading = Limiter(*map(with_unreachable_limits, rules), name="login", store=store)
    found = []
    for _ in range(4):
        limiter.hit("a")
        usage = usage_of(rules[1], reading.check("a", 0).results[1], limiter.check("a").results[1])
        found.append((usage.used, usage.remaining, usage.frees_after, usage.reset_after))
    assert found == [(0, 3, 0, 0), (1, 2, 0, 900), (2, 1, 0, 900), (3, 0, 900, 900)]


def test_header_fields_name_a_penalty_only_while_it_refuses() -> None:
    limiter = Limiter("1/minute", penalty("15m", after=2), clock=FakeClock())
    headers = Writer(limiter.rules)
    fields = [headers.text_fields(limiter.hit("a"), 0) for _ in range(3)]
    assert {each["RateLimit-Policy"] for each in fields} == {
        '"per-minute";q=1;w=60, "penalty";q=2;qu="refusals";w=900'
    }
    assert [each["RateLimit"] for each in fields] == [
        '"per-minute";r=0;t=61',
        '"per-minute";r=0;t=61',
        '"per-minute";r=0;t=61, "penalty";r=0;t=900',
    ]
    assert (fields[2]["Retry-After"], fields[2]["X-RateLimit-Remaining"]) == ("900", "0")
    assert fields[1]["X-RateLimit-Limit"] == "1"


def test_header_fields_reset_at_the_end_of_a_penalty() -> None:
    """It is remembered for the next one, but nothing is refused any more."""
    strict = penalty("15m", after=1, growth=2, longest="1d")
    limiter = Limiter("1/minute", strict, clock=FakeClock())
    limiter.hit("a")
    refused, headers = limiter.hit("a"), Writer(limiter.rules)
    assert refused.reset_after == 86_400 + 900
    fields = headers.text_fields(refused, 0)
    assert (fields["Retry-After"], fields["X-RateLimit-Reset"]) == ("900", "900")


# --- Policies ---------------------------------------------------------------------------------------------------------


def test_a_penalty_in_a_policy_file() -> None:
    text = '{ kind = "penalty", quota = "3/15 minutes", growth = 2, longest = "1 day" }'
    policy = parse_policy(f'[limiters.login]\nrules = ["5/minute", {text}]')
    assert policy.limiters["login"].rules[1] == penalty("15m", after=3, growth=2, longest="1d")
    assert (
        "  - nothing for 15m after 3 refusals within that time for each key "
        "(the next one is 2 times as long, up to 1d)  [penalty]" in explain(policy)
    )
    strict = parse_policy('[limiters.login]\nrules = ["5/minute", { kind = "penalty", quota = "1/15m" }]')
    assert "  - nothing for 15m after 1 refusal for each key  [penalty]" in explain(strict)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ('"5/m", { kind = "penalty", quota = "3/15m", shadow = true }', "cannot be a shadow rule"),
        ('{ quota = "5/m", shadow = true }, { kind = "penalty", quota = "3/15m" }', "there is none"),
        ('"5/m", { kind = "penalty", quota = "0/15m" }', "at least 1 refusal"),
        ('"5/m", { quota = "3/15m", growth = 2 }', "growth is for penalty"),
        ('"5/m", { kind = "penalty", quota = "3/15m", growth = 2, longest = "soon" }', "longest penalty"),
    ],
)
def test_penalties_that_a_policy_file_cannot_have(rules: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        parse_policy(f"[limiters.login]\nrules = [{rules}]")


def test_a_client_reads_the_penalty_of_its_server() -> None:
    shown = {
        "name": "penalty",
        "kind": "penalty",
        "quota": "3/15m",
        "scope": None,
        "tiers": {},
        "growth": 2,
        "longest": 86_400.0,
    }
    limiter = {
        "name": "login",
        "store": "memory://",
        "on_store_error": "open",
        "default_tier": None,
        "headers": "both",
        "rules": [shown],
        "shadow": [],
    }
    assert read_limiter(limiter).rules == (penalty("15m", after=3, growth=2, longest="1d"),)
