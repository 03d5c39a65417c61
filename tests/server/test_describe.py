"""Limiters and rules as the API shows them."""

from __future__ import annotations

import pytest

from headgate.policy import parse_policy
from headgate_server.describe import limiter_shown, rule_toml

RULES = [
    '"5/minute"',
    '{ quota = "10/s burst 20", name = "burst" }',
    '{ quota = "10/s", kind = "fixed_window", name = "a \\"b\\" \\u007f" }',
    '{ quota = "3/hour", kind = "sliding_log", scope = "user", tiers = { pro = "9/hour", "a b" = "4/hour" } }',
    '{ quota = "3/hour", buckets = 7, strict = false, unit = "tokens" }',
    '{ quota = 5, kind = "concurrent", lease = "1500ms", tiers = { pro = 9 } }',
    '{ quota = 5, kind = "concurrent", lease = "60s" }',
    '{ quota = "100/month", kind = "calendar", timezone = "Europe/Berlin" }',
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_shadow", [False, True])
def test_a_rule_for_the_file_reads_as_the_rule(rule: str, is_shadow: bool) -> None:
    (read,) = parse_policy(f"[limiters.x]\nrules = [{rule}]").limiters["x"].rules
    again = parse_policy(f"[limiters.x]\nrules = [{rule_toml(read, is_shadow=is_shadow)}]").limiters["x"]
    assert (again.shadow if is_shadow else again.rules) == (read,)


def test_limiter_has_its_position_in_the_file() -> None:
    text = """
[limiters.login]
rules = [
  "5/minute",
  { quota = "50/hour", name = "hourly", shadow = true },
]
[[limiters.api.rules]]
quota = "9/minute"
[limiters]
dotted.rules = ["5/minute; 9/hour"]
"""
    policy = parse_policy(text, "headgate.toml", {"HEADGATE_LIMITERS__API__RULES": '["7/minute"]'})
    login, api, dotted = map(limiter_shown, policy.limiters.values())
    assert (login.source, login.rules[0].source) == ("headgate.toml:2", "headgate.toml:4")
    assert login.shadow[0].source == "headgate.toml:5"
    assert login.shadow[0].toml == '{ quota = "50/hour", name = "hourly", shadow = true }'
    assert api.rules[0].source == "HEADGATE_LIMITERS__API__RULES"
    assert dotted.source == "headgate.toml:10"
    assert [rule.source for rule in dotted.rules] == ["headgate.toml:10"] * 2


def test_a_limiter_that_moved_in_the_file_has_not_changed() -> None:
    before = parse_policy('[limiters.login]\nrules = ["5/minute"]', "headgate.toml")
    after = parse_policy('\n[limiters.login]\nrules = ["5/minute"]', "headgate.toml")
    assert before == after
    assert after.limiters["login"].source == "headgate.toml:2"
