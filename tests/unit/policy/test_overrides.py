"""Overrides: quotas of single keys, and calls that several of them match."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from headgate.policy import LivePolicy, PolicyError, explain, parse_policy
from headgate.testing import FakeClock

RULES = """
[limiters.api]
rules = [
  { quota = "10/hour", name = "per_user", scope = "user", tiers = { pro = "20/hour" } },
  { quota = "100/hour", name = "per_realm", scope = "realm", tiers = { pro = "200/hour" } },
  { quota = "1000/hour", name = "all", scope = "*" },
]
"""
PLAIN = '[limiters.api]\nrules = [{ quota = "1/h", name = "x" }]\n'

USER = 'key = { user = "42" }\nrules = { per_user = "11/hour" }'
REALM = 'key = { realm = "north" }\nrules = { per_realm = "111/hour" }'
BOTH = 'key = { user = "42", realm = "north" }\nrules = { per_user = "12/hour" }'
USERS_OF_REALM = 'key = { realm = "north" }\nrules = { per_user = "13/hour" }'


def text(*overrides: str, rules: str = RULES) -> str:
    return textwrap.dedent(rules) + "".join(
        f"[[limiters.api.overrides]]\n{override}\n" for override in overrides
    )


def limits(policy: str, key: Any, tier: str | None = None, quota: Any = None) -> list[int]:
    """Return the limit of each rule for a call."""
    api = LivePolicy(parse_policy(policy), clock=FakeClock())["api"]
    return [result.limit for result in api.hit(key, tier=tier, quota=quota).results]


@pytest.mark.parametrize(
    ("overrides", "user", "realm", "expected"),
    [
        ((USER,), "42", "north", [11, 100]),
        ((USER,), "42", "south", [11, 100]),
        ((USER,), "43", "north", [10, 100]),
        ((USER, REALM), "42", "north", [11, 111]),
        ((USER, REALM), "43", "north", [10, 111]),
        ((USER, REALM, BOTH), "42", "north", [12, 111]),
        ((BOTH, REALM, USER), "42", "north", [12, 111]),
        ((BOTH, REALM, USER), "42", "south", [11, 100]),
        ((USER, USERS_OF_REALM), "42", "north", [13, 100]),
        ((USERS_OF_REALM, USER), "42", "north", [11, 100]),
        ((USERS_OF_REALM, USER), "43", "north", [13, 100]),
    ],
)
def test_all_matching_overrides_apply_and_more_scopes_then_the_later_one_win(
    overrides: tuple[str, ...], user: str, realm: str, expected: list[int]
) -> None:
    assert limits(text(*overrides), {"user": user, "realm": realm}) == [*expected, 1000]


@pytest.mark.parametrize(
    ("tier", "default", "expected"),
    [("pro", "", [11, 200, 1000]), ("unknown", "", [11, 100, 1000]), (None, "pro", [11, 200, 1000])],
)
def test_rules_without_an_override_keep_the_tier_of_the_call(
    tier: str | None, default: str, expected: list[int]
) -> None:
    rules = RULES + (f'default_tier = "{default}"\n' if default else "")
    assert limits(text(USER, rules=rules), {"user": "42", "realm": "north"}, tier) == expected


def test_a_quota_of_the_call_precedes_an_override() -> None:
    key = {"user": "42", "realm": "north"}
    quota = {"per_user": "7/hour"}
    assert limits(text(USER, REALM), key, quota=quota) == [7, 111, 1000]


def test_text_matches_the_same_text_as_bytes() -> None:
    """A file cannot contain bytes, and the address of a client is bytes."""
    policy = text('key = "192.0.2.1"\nrules = { x = "2/h" }', rules=PLAIN)
    keys = ("192.0.2.1", b"192.0.2.1", b"192.0.2.2", b"\xff")
    assert [limits(policy, key) for key in keys] == [[2], [2], [1], [1]]
    assert limits(text(USER), {"user": b"42", "realm": b"x"}) == [11, 100, 1000]


@pytest.mark.parametrize("key", [None, 5, ["ada"], {"user": ["ada"]}, {}, {"user": None}])
def test_an_invalid_key_has_no_override(key: Any) -> None:
    policy = parse_policy(text(USER)).limiters["api"]
    assert policy.terms_for(key, "pro") == ("pro", None)


def test_300_overrides_of_one_scope() -> None:
    many = [f'key = {{ user = "{n}" }}\nrules = {{ per_user = "{n}/hour" }}' for n in range(1, 301)]
    assert limits(text(*many, REALM), {"user": "300", "realm": "north"}) == [300, 111, 1000]


@pytest.mark.parametrize(
    ("overrides", "place", "message"),
    [
        (['key = "42"\nrules = { per_user = "1/hour" }'], "9:7", 'write for example { realm = "42" }'),
        (['key = { rum = "42" }\nrules = { per_user = "1/hour" }'], "9:15", "no rule counts by 'rum'"),
        (['key = { user = 42 }\nrules = { per_user = "1/hour" }'], "9:7", "text for each"),
        (["key = {}\nrules = {}"], "9:7", "text for each"),
        (['key = { user = "42" }\nrules = { per_user = "1/day" }'], "10:22", "period"),
        ([USER, USER], "12:7", "overridden twice"),
    ],
)
def test_an_invalid_override_is_an_error_with_its_position(
    overrides: list[str], place: str, message: str
) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_policy(text(*overrides), "headgate.toml")
    assert str(caught.value).startswith(f"headgate.toml:{place}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "quota", "message"),
    [
        ('{ quota = "5/h", kind = "sliding_log", name = "x" }', "1001/h", "limit of at most 1000, not 1001"),
        ('{ quota = "5/h burst 5", name = "x" }', "9007199254740991/h burst 9007199254740991", "exactly"),
    ],
)
def test_an_override_that_the_store_cannot_count_is_refused_when_the_policy_is_loaded(
    rule: str, quota: str, message: str, tmp_path: Path
) -> None:
    rules = f'store.url = "sqlite:///{tmp_path}/limits.db"\n[limiters.api]\nrules = [{rule}]\n'
    policy = parse_policy(text(f'key = "ada"\nrules = {{ x = "{quota}" }}', rules=rules))
    with pytest.raises(PolicyError, match=f"limiter 'api': .*{message}"):
        LivePolicy(policy)


def test_explain_lists_overrides() -> None:
    explained = explain(parse_policy(text(USER, REALM)))
    assert [line for line in explained.split("\n") if "Override" in line] == [
        "  Override for {'user': '42'}: at most 11 in any hour (per_user).",
        "  Override for {'realm': 'north'}: at most 111 in any hour (per_realm).",
    ]
