"""Overrides: quotas of single keys, and calls to which several of them apply."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from headgate import Limiter
from headgate.policy import LimiterPolicy, PolicyError, explain, parse_policy
from headgate.testing import FakeClock

RULES = """
[limiters.api]
rules = [
  { quota = "10/hour", name = "per_user", scope = "user", tiers = { pro = "20/hour" } },
  { quota = "100/hour", name = "per_realm", scope = "realm", tiers = { pro = "200/hour" } },
  { quota = "1000/hour", name = "all", scope = "*" },
]
"""


def policy(*overrides: str, rules: str = RULES) -> LimiterPolicy:
    text = textwrap.dedent(rules) + "".join(
        f"[[limiters.api.overrides]]\n{override}\n" for override in overrides
    )
    return parse_policy(text, "headgate.toml").limiters["api"]


def limits(api: LimiterPolicy, key: Any, tier: str | None = None) -> list[int]:
    """Return the limit of each rule for a call."""
    limiter = Limiter(*api.rules, clock=FakeClock())
    decision = limiter.check(key, tier=api.tier_for(key, tier))
    return [result.limit for result in decision.results]


USER = 'key = { user = "42" }\nrules = { per_user = "11/hour" }'
REALM = 'key = { realm = "north" }\nrules = { per_realm = "111/hour" }'
BOTH = 'key = { user = "42", realm = "north" }\nrules = { per_user = "12/hour" }'


def test_one_applies_to_every_call_with_its_entries_whatever_else_the_key_has() -> None:
    api = policy(USER)
    assert limits(api, {"user": "42", "realm": "north"}) == [11, 100, 1000]
    assert limits(api, {"user": "42", "realm": "south"}) == [11, 100, 1000]
    assert limits(api, {"user": "43", "realm": "north"}) == [10, 100, 1000]


def test_all_that_apply_do() -> None:
    api = policy(USER, REALM)
    assert limits(api, {"user": "42", "realm": "north"}) == [11, 111, 1000]
    assert limits(api, {"user": "42", "realm": "south"}) == [11, 100, 1000]
    assert limits(api, {"user": "43", "realm": "north"}) == [10, 111, 1000]


def test_the_one_with_more_entries_wins() -> None:
    for overrides in ((USER, REALM, BOTH), (BOTH, REALM, USER)):
        api = policy(*overrides)
        assert limits(api, {"user": "42", "realm": "north"}) == [12, 111, 1000]
        assert limits(api, {"user": "42", "realm": "south"}) == [11, 100, 1000]


def test_three_that_meet() -> None:
    rules = """
    [limiters.api]
    rules = [
      { quota = "1/hour", name = "a", scope = "a" },
      { quota = "2/hour", name = "b", scope = "b" },
      { quota = "3/hour", name = "c", scope = "c" },
    ]
    """
    overrides = [
        f'key = {{ {scope} = "x" }}\nrules = {{ {scope} = "{n}/hour" }}'
        for n, scope in ((7, "a"), (8, "b"), (9, "c"))
    ]
    api = policy(*overrides, rules=rules)
    assert limits(api, {"a": "x", "b": "x", "c": "x"}) == [7, 8, 9]
    assert limits(api, {"a": "x", "b": "y", "c": "x"}) == [7, 2, 9]
    assert limits(api, {"a": "y", "b": "x", "c": "y"}) == [1, 8, 3]


def test_rules_that_an_override_says_nothing_about_keep_their_tiers() -> None:
    api = policy(USER)
    key = {"user": "42", "realm": "north"}
    assert limits(api, key, "pro") == [11, 200, 1000]
    assert limits(api, key, "unknown") == [11, 100, 1000]
    api = policy(USER, rules=RULES + 'default_tier = "pro"\n')
    assert limits(api, key) == [11, 200, 1000]


def test_one_that_speaks_of_every_rule_with_tiers_needs_no_tier_of_its_own_for_each() -> None:
    api = policy(
        'key = "ada"\nrules = { x = "2/h" }',
        rules='[limiters.api]\nrules = [{ quota = "1/h", name = "x", tiers = { a = "3/h", b = "4/h" } }]\n',
    )
    assert sorted(api.rules[0].tiers) == ["a", "b", "override:0"]


def test_nobody_gets_the_quotas_of_others_by_naming_them() -> None:
    api = policy(USER)
    for tier in ("override:0", "override:0/pro"):
        assert limits(api, {"user": "43", "realm": "north"}, tier) == [10, 100, 1000]


def test_text_and_its_bytes_are_meant_alike() -> None:
    """A file cannot write bytes, and the address of a client is bytes."""
    api = policy(
        'key = "192.0.2.1"\nrules = { x = "2/h" }',
        rules='[limiters.api]\nrules = [{ quota = "1/h", name = "x" }]\n',
    )
    assert [limits(api, key) for key in ("192.0.2.1", b"192.0.2.1", b"192.0.2.2", b"\xff")] == [
        [2],
        [2],
        [1],
        [1],
    ]
    assert limits(policy(USER), {"user": b"42", "realm": b"x"}) == [11, 100, 1000]


@pytest.mark.parametrize("key", [None, 5, ["ada"], {"user": ["ada"]}, {}, {"user": None}])
def test_what_is_no_key_has_no_override(key: Any) -> None:
    assert policy(USER).tier_for(key, "pro") == "pro"


def test_many_keys_of_one_scope_are_read_in_no_time_and_found() -> None:
    many = [f'key = {{ user = "{n}" }}\nrules = {{ per_user = "{n}/hour" }}' for n in range(1, 301)]
    api = policy(*many, REALM)
    assert limits(api, {"user": "300", "realm": "north"}) == [300, 111, 1000]


@pytest.mark.parametrize(
    ("overrides", "place", "complaint"),
    [
        (
            [USER, 'key = { realm = "north" }\nrules = { per_user = "12/hour" }'],
            "11:1",
            "contradict each other about rule 'per_user' for key {'realm': 'north', 'user': '42'}",
        ),
        (['key = "42"\nrules = { per_user = "1/hour" }'], "9:7", 'write for example { realm = "42" }'),
        (['key = { rum = "42" }\nrules = { per_user = "1/hour" }'], "9:15", "no rule counts by 'rum'"),
        (['key = { user = 42 }\nrules = { per_user = "1/hour" }'], "9:7", "text for each"),
        (["key = {}\nrules = {}"], "9:7", "text for each"),
        (['key = { user = "42" }\nrules = { per_user = "1/day" }'], "10:22", "period"),
        ([USER, USER], "12:7", "overridden twice"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(overrides: list[str], place: str, complaint: str) -> None:
    with pytest.raises(PolicyError) as caught:
        policy(*overrides)
    assert str(caught.value).startswith(f"headgate.toml:{place}: ")
    assert complaint in str(caught.value)


def test_a_contradiction_is_settled_by_one_for_just_that_key() -> None:
    other = 'key = { realm = "north" }\nrules = { per_user = "13/hour" }'
    api = policy(USER, other, BOTH)
    assert limits(api, {"user": "42", "realm": "north"})[0] == 12
    assert limits(api, {"user": "43", "realm": "north"})[0] == 13
    with pytest.raises(PolicyError, match="contradict"):
        policy(USER, other, BOTH.replace("per_user", "per_realm").replace("12/hour", "120/hour"))


def test_two_that_say_the_same_do_not_contradict() -> None:
    api = policy(USER, USER.replace("user =", "realm =", 1).replace("42", "north"))
    assert limits(api, {"user": "42", "realm": "north"})[0] == 11


def test_too_many_meetings_are_refused() -> None:
    users = [f'key = {{ user = "{n}" }}\nrules = {{ per_user = "1/hour" }}' for n in range(101)]
    realms = [f'key = {{ realm = "{n}" }}\nrules = {{ per_realm = "1/hour" }}' for n in range(100)]
    with pytest.raises(PolicyError, match="more than 10,000 ways"):
        policy(*users, *realms)


def test_a_tier_cannot_be_called_like_an_override() -> None:
    with pytest.raises(PolicyError, match="2:52: names that begin with 'override:' are reserved"):
        parse_policy('[limiters.x]\nrules = [{ quota = "1/h", tiers = { "override:0" = "2/h" } }]')


def test_overrides_in_plain_words() -> None:
    text = (
        textwrap.dedent(RULES) + f"[[limiters.api.overrides]]\n{USER}\n[[limiters.api.overrides]]\n{REALM}\n"
    )
    assert [line for line in explain(parse_policy(text)).split("\n") if "its own" in line] == [
        "  {'user': '42'} has its own: at most 11 in any hour (per_user).",
        "  {'realm': 'north'} has its own: at most 111 in any hour (per_realm).",
        (
            "  {'realm': 'north', 'user': '42'} has its own: "
            "at most 11 in any hour (per_user), at most 111 in any hour (per_realm)."
        ),
    ]
