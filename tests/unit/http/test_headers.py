"""Header fields: what we write is read back by a parser of structured fields that is not ours."""

from __future__ import annotations

import re
from typing import Any, get_args

import http_sf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import (
    ConfigError,
    Decision,
    Limiter,
    Quota,
    Rule,
    fixed_window,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate._limiting import HeaderStyle
from headgate.decision import UNLIMITED, Verdict
from headgate.http.headers import (
    STYLES,
    Asked,
    Headers,
    Writer,
    all_fields,
    encoded,
    released,
    replaced,
    retry_seconds,
    wire_name,
)
from headgate.quota import MAX_PERIOD_US, MAX_UNITS
from headgate.testing import FakeClock

NOW = 1_700_000_000_250_000
KINDS = (fixed_window, sliding_window, sliding_log, token_bucket)

quotas = st.builds(
    Quota,
    st.integers(0, MAX_UNITS),
    st.integers(1, MAX_PERIOD_US // 1000).map(lambda milliseconds: milliseconds * 1000),
)
names = st.text(min_size=1, max_size=20)
rule_sets = st.lists(st.tuples(names, quotas), min_size=1, max_size=4, unique_by=lambda pair: pair[0]).map(
    lambda pairs: [sliding_window(quota, name=name) for name, quota in pairs]
)


@st.composite
def decisions(draw: st.DrawFn, rules: list[Rule]) -> Decision:
    """Anything that a store could answer for these rules."""
    verdicts = []
    for rule in rules:
        allowed = draw(st.booleans()) and rule.quota.limit > 0
        never = rule.quota.limit == 0
        remaining = draw(st.integers(0, rule.quota.limit))
        retry_us = None if allowed or never else draw(st.integers(0, MAX_PERIOD_US))
        reset_us = None if never else (retry_us or 0) + draw(st.integers(0, MAX_PERIOD_US))
        verdicts.append(Verdict(allowed, rule.quota.limit, remaining, retry_us, reset_us))
    return Decision.make(tuple(rule.name for rule in rules), verdicts)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Rule], Decision]:
    rules = draw(rule_sets)
    return rules, draw(decisions(rules))


def parsed(value: bytes, kind: str = "list") -> Any:
    """Parse a structured field."""
    return http_sf.parse(value, tltype=kind)


def fields_of(limiter: Limiter, decision: Decision, **style: Any) -> dict[str, str]:
    written = Writer(limiter.rules, Headers(**style)).fields(decision, NOW)
    assert len(dict(written)) == len(written)
    return {name.decode(): value.decode() for name, value in written}


@given(cases())
def test_structured_fields_match_the_decision(case: tuple[list[Rule], Decision]) -> None:
    rules, decision = case
    fields = dict(Writer(rules).fields(decision, NOW))
    policies, limits = parsed(fields[b"ratelimit-policy"]), parsed(fields[b"ratelimit"])
    expected_names = [wire_name(rule.name) for rule in rules]
    assert [name for name, _ in policies] == [name for name, _ in limits] == expected_names
    for rule, verdict, (_, policy), (_, left) in zip(rules, decision.verdicts, policies, limits, strict=True):
        assert policy["q"] == min(rule.quota.limit, 10**15 - 1)
        assert policy.get("w", 0) * 1_000_000 in (0, rule.quota.period_us)
        assert left["r"] == min(verdict.remaining, 10**15 - 1)
        assert left.get("t", 0) >= 0
        assert policy.keys() <= {"q", "w"}
        assert left.keys() <= {"r", "t"}


@given(cases())
def test_no_window_ends_after_retry_after(case: tuple[list[Rule], Decision]) -> None:
    rules, decision = case
    fields = dict(Writer(rules).fields(decision, NOW))
    if b"retry-after" in fields:
        wait = int(fields[b"retry-after"])
        assert all(left.get("t", 0) <= wait for _, left in parsed(fields[b"ratelimit"]))


@given(cases())
def test_only_temporary_refusals_have_retry_after(case: tuple[list[Rule], Decision]) -> None:
    rules, decision = case
    fields = dict(Writer(rules).fields(decision, NOW))
    assert (b"retry-after" in fields) == (decision.retry_after is not None)
    if decision.retry_after is not None:
        wait = int(fields[b"retry-after"])
        assert wait >= 1
        assert 0 <= wait - decision.retry_after < 1 or wait == 1


@given(st.text(), st.text())
def test_different_names_stay_different(one: str, other: str) -> None:
    assert (wire_name(one) == wire_name(other)) == (one == other)


@pytest.mark.parametrize(
    "name", ['say "hi"', "back\\slash", "50%", "naïve", "line\nbreak", "\udc80", "é" * 9]
)
def test_special_characters_in_names_are_escaped(name: str) -> None:
    limiter = Limiter(sliding_window("5/minute", name=name))
    fields = fields_of(limiter, limiter.hit("a"))
    [(parsed_name, parameters)] = parsed(fields["ratelimit-policy"].encode())
    assert parsed_name == wire_name(name)
    assert parameters == {"q": 5, "w": 60}


@pytest.mark.parametrize("kind", KINDS)
def test_retry_after_is_the_shortest_wait_in_whole_seconds(kind: Any) -> None:
    clock = FakeClock(NOW / 1e6)
    limiter = Limiter(kind("3/10s"), clock=clock)
    while limiter.hit("a"):
        clock.advance(0.3)
    wait = int(fields_of(limiter, limiter.check("a"))["retry-after"])
    clock.advance(wait - 1)
    assert not limiter.check("a")
    clock.advance(1)
    assert limiter.check("a")


def test_reset_is_the_epoch_or_seconds_from_now() -> None:
    limiter = Limiter(fixed_window("5/minute"), clock=FakeClock(NOW / 1e6))
    decision = limiter.hit("a")
    assert decision.reset_after == 39.75
    assert fields_of(limiter, decision)["x-ratelimit-reset"] == "1700000040"
    assert fields_of(limiter, decision, x_ratelimit="seconds")["x-ratelimit-reset"] == "40"


@pytest.mark.parametrize(
    ("word", "families"),
    [
        ("both", {"ratelimit", "x-ratelimit"}),
        ("ietf", {"ratelimit"}),
        ("x-ratelimit", {"x-ratelimit"}),
        ("none", set()),
    ],
)
def test_style_name_selects_the_header_families(word: Any, families: set[str]) -> None:
    limiter = Limiter("5/minute")
    written = Writer(limiter.rules, word).fields(limiter.hit("a"), NOW)
    assert {"x-ratelimit" if name.startswith(b"x-") else "ratelimit" for name, _ in written} == families


def test_limiters_and_writers_accept_the_same_style_names() -> None:
    assert tuple(STYLES) == get_args(HeaderStyle)


@pytest.mark.parametrize("wrong", ["draft-11", None, Headers])
def test_unknown_style_name_is_refused(wrong: Any) -> None:
    message = f"headers= is 'both', 'ietf', 'x-ratelimit', 'none' or Headers(…), not {wrong!r}"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        Writer((), wrong)


@pytest.mark.parametrize("revision", [6, 7, 11])
@pytest.mark.parametrize("reset", ["epoch", None])
def test_style_lists_exactly_the_header_names_it_writes(revision: int, reset: str | None) -> None:
    style = Headers(x_ratelimit=reset, ratelimit=revision)  # type: ignore[arg-type]
    limiter = Limiter("5/minute")
    written = Writer(limiter.rules, style).fields(limiter.hit("a"), NOW)
    assert {name.decode() for name, _ in written} == {name.lower() for name in style.names}


def test_headers_of_draft_revision_7() -> None:
    limiter = Limiter(fixed_window("5/minute"), "50/hour", clock=FakeClock(NOW / 1e6))
    fields = fields_of(limiter, limiter.hit("a"), ratelimit=7)
    values = {name: value for name, (value, _) in parsed(fields["ratelimit"].encode(), "dictionary").items()}
    assert values == {"limit": 5, "remaining": 4, "reset": 40}
    assert parsed(fields["ratelimit-policy"].encode()) == [(5, {"w": 60}), (50, {"w": 3600})]


def test_headers_of_draft_revision_6() -> None:
    limiter = Limiter(fixed_window("1/minute"), clock=FakeClock(NOW / 1e6))
    limiter.hit("a")
    fields = fields_of(limiter, limiter.hit("a"), ratelimit=6, x_ratelimit=None)
    assert fields == {
        "ratelimit-policy": "1;w=60",
        "ratelimit-limit": "1",
        "ratelimit-remaining": "0",
        "ratelimit-reset": "40",
        "retry-after": "40",
    }


def test_window_is_omitted_unless_it_is_whole_seconds() -> None:
    limiter = Limiter("5/500ms")
    assert parsed(fields_of(limiter, limiter.hit("a"))["ratelimit-policy"].encode())[0][1] == {"q": 5}


def test_each_tier_has_its_own_policy_header() -> None:
    limiter = Limiter(sliding_window("5/minute", tiers={"pro": "50/minute"}))
    writer = Writer(limiter.rules)
    for tier, limit in ((None, 5), ("pro", 50), ("unheard of", 5)):
        fields = dict(writer.fields(limiter.hit("a", tier=tier), NOW, tier))
        assert parsed(fields[b"ratelimit-policy"])[0][1]["q"] == limit
        assert fields[b"x-ratelimit-limit"] == b"%d" % limit


def test_permanent_refusal_has_no_reset_time() -> None:
    limiter = Limiter("0/minute")
    fields = fields_of(limiter, limiter.hit("a"))
    assert set(fields) == {"ratelimit-policy", "ratelimit", "x-ratelimit-limit", "x-ratelimit-remaining"}
    assert fields["ratelimit"].endswith(";r=0")


def test_limiter_without_rules_writes_no_headers() -> None:
    assert Writer(()).fields(UNLIMITED, NOW) == []


def test_refusal_without_rule_results_has_only_retry_after() -> None:
    """A limiter that fails closed answers like this until it calls its store again."""
    refused = UNLIMITED.as_refused(2_500_000).as_degraded()
    assert Writer(()).fields(refused, NOW) == [(b"retry-after", b"3")]


@pytest.mark.parametrize(("retry_us", "wait"), [(0, 1), (1, 1), (1_000_000, 1), (1_000_001, 2)])
def test_retry_after_is_rounded_up_and_at_least_one(retry_us: int, wait: int) -> None:
    assert retry_seconds(UNLIMITED.as_refused(retry_us)) == wait


@pytest.mark.parametrize("style", [{"x_ratelimit": "iso"}, {"ratelimit": 5}])
def test_invalid_header_options_are_refused(style: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Headers(**style)


# --- Several limiters for one response --------------------------------------------------------------------------------


def asked(limiter: Limiter, hits: int = 1, **style: Any) -> Asked:
    for _ in range(hits):
        decision = limiter.hit("a")
    return Writer(limiter.rules, Headers(**style)), decision, None, NOW


def test_policies_of_several_limiters_get_unique_names() -> None:
    both = [asked(Limiter("100/minute")), asked(Limiter("5/minute"))]
    fields = dict(encoded(all_fields(both)))
    policies, left = parsed(fields[b"ratelimit-policy"]), parsed(fields[b"ratelimit"])
    assert [name for name, _ in policies] == ["per-minute", "per-minute-2"]
    assert [name for name, _ in left] == [name for name, _ in policies]
    assert [policy["q"] for _, policy in policies] == [100, 5]


def test_unknown_rules_get_unique_names_and_no_policy() -> None:
    """Such as rules of a server, or of a refusal that was raised as an exception."""
    writer, decision, tier, now = asked(Limiter("5/minute"))
    unknown = Writer(()), decision, tier, now
    fields = dict(all_fields([(writer, decision, tier, now), unknown]))
    assert fields["RateLimit-Policy"] == '"per-minute";q=5;w=60'
    assert [name for name, _ in parsed(fields["RateLimit"].encode())] == [
        "per-minute",
        "per-minute-2",
    ]
    for alone in ([unknown], [unknown, unknown]):
        assert "RateLimit-Policy" not in dict(all_fields(alone))


def test_x_ratelimit_headers_describe_the_limiter_with_the_least_remaining() -> None:
    fields = dict(
        encoded(all_fields([asked(Limiter("100/minute")), asked(Limiter("5/minute")), asked(Limiter())]))
    )
    assert fields[b"x-ratelimit-limit"] == b"5"
    assert b"retry-after" not in fields


def test_x_ratelimit_headers_describe_the_refusing_limiter() -> None:
    fields = dict(encoded(all_fields([asked(Limiter("9/hour"), 9), asked(Limiter(fixed_window("1/s")), 2)])))
    assert fields[b"x-ratelimit-limit"] == b"1"
    assert fields[b"retry-after"] == b"1"
    assert all(parameters["t"] <= 1 for _, parameters in parsed(fields[b"ratelimit"]))


def test_several_limiters_without_rules_write_no_headers() -> None:
    assert all_fields([asked(Limiter()), asked(Limiter())]) == {}
    assert all_fields([]) == {}


def test_only_current_revisions_are_merged() -> None:
    fields = dict(encoded(all_fields([asked(Limiter("9/minute"), ratelimit=7), asked(Limiter("5/minute"))])))
    assert len(parsed(fields[b"ratelimit"])) == 1
    fields = dict(
        encoded(
            all_fields([asked(Limiter("9/minute"), ratelimit=6), asked(Limiter("5/minute"), ratelimit=6)])
        )
    )
    assert fields[b"ratelimit-limit"] == b"5"


def test_header_list_of_the_application_is_not_modified() -> None:
    own = [("X-RateLimit-Limit", "7")]
    assert replaced(own, [("RateLimit", "ours")]) == [("X-RateLimit-Limit", "7"), ("RateLimit", "ours")]
    assert replaced(own, [("X-RateLimit-Limit", "5")]) == [("X-RateLimit-Limit", "5")]
    assert own == [("X-RateLimit-Limit", "7")]


@pytest.mark.parametrize("rules", [("5/minute",), ("5/minute", "50/hour")])
def test_released_units_are_added_to_remaining(rules: tuple[str, ...]) -> None:
    limiter = Limiter(*rules)
    limiter.hit("a", 2)
    hold = limiter.hold("a")
    _, after, _, _ = released((Writer(limiter.rules), hold.decision, None, NOW), 1)
    hold.release()
    assert after.remaining == limiter.check("a", 0).remaining == 3
    _, most, _, _ = released((Writer(limiter.rules), hold.decision, None, NOW), 99)
    assert most.remaining == 5
