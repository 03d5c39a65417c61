"""Rules: names, scopes, tiers and state identities."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from headgate import (
    AsyncLimiter,
    ConfigError,
    Limiter,
    MemoryStore,
    Quota,
    Rule,
    calendar,
    concurrent,
    fixed_window,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.algorithms import FixedWindow, SlidingWindow, TokenBucket, algorithm_for
from headgate.quota import MAX_UNITS
from headgate.rules import rules_from
from headgate.stores.kv import KVStore, MemoryKV

MAKERS = (fixed_window, sliding_window, sliding_log, token_bucket)
every_kind = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
Make = Callable[..., Rule]


@every_kind
def test_rule_has_a_kind_a_quota_and_a_default_name(make: Make) -> None:
    rule = make("5/15m", scope="user")
    assert (rule.kind, rule.quota, rule.scope) == (make.__name__, Quota.parse("5/15m"), "user")
    assert rule.name == "per-15-minutes-user"
    assert make("5/minute").name == "per-minute"
    assert make("5/14d").name == "per-14-days"
    assert make("5/minute", scope="*").name == "per-minute-shared"
    assert make("5/minute", scope="user", unit="tokens").name == "per-minute-user-tokens"
    assert make("5/minute", scope="*", name="all").name == "all"
    assert str(make("5/minute", name="all")) == "all (5/minute)"


@every_kind
def test_a_rule_takes_a_quota_as_text_or_as_a_value(make: Make) -> None:
    assert make("5/minute") == make(Quota.parse("5/minute"))


@every_kind
def test_a_rule_is_a_value(make: Make) -> None:
    rule = make("5/minute", scope="user", tiers={"pro": "50/minute"}, name="x")
    assert pickle.loads(pickle.dumps(rule)) == copy.deepcopy(rule) == copy.copy(rule) == rule
    assert {rule, copy.deepcopy(rule)} == {rule}
    assert rule != make("5/minute", scope="user", tiers={"pro": "51/minute"}, name="x")
    with pytest.raises(AttributeError):
        rule.name = "y"  # type: ignore[misc]
    with pytest.raises(TypeError):
        rule.tiers["free"] = rule.quota  # type: ignore[index]


def test_tiers_of_a_copied_rule_are_read_only() -> None:
    rule = copy.deepcopy(sliding_window("5/minute", tiers={"pro": "50/minute"}))
    with pytest.raises(TypeError):
        rule.tiers["free"] = rule.quota  # type: ignore[index]


# --- Tiers -----------------------------------------------------------------------------------------------------------


@every_kind
def test_unknown_tier_uses_the_quota_of_the_rule(make: Make) -> None:
    rule = make("5/minute", tiers={"pro": "50/minute", "none": Quota(0, 60_000_000)})
    assert rule.quota_for("pro") == Quota.parse("50/minute")
    assert rule.quota_for("none").limit == 0
    assert rule.quota_for("unheard of") == rule.quota_for(None) == rule.quota


@every_kind
def test_a_tier_of_another_period_is_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"tier 'pro': .* '50/hour': .* '5/minute'"):
        make("5/minute", tiers={"pro": "50/hour"})


@pytest.mark.parametrize("make", MAKERS[:3], ids=lambda make: make.__name__)
def test_only_a_token_bucket_has_bursts(make: Make) -> None:
    with pytest.raises(ConfigError, match="has no burst"):
        make("5/minute burst 7")
    with pytest.raises(ConfigError, match="has no burst"):
        make("5/minute", tiers={"pro": "5/minute burst 7"})


def test_contradicting_bursts_of_a_token_bucket_are_refused() -> None:
    assert token_bucket("5/minute", burst=7) == token_bucket("5/minute burst 7")
    assert token_bucket("5/minute burst 7", burst=7).quota.burst == 7
    with pytest.raises(ConfigError, match="burst=8 contradicts '5/minute burst 7'"):
        token_bucket("5/minute burst 7", burst=8)


def test_burst_applies_to_tiers_without_a_burst() -> None:
    rule = token_bucket(
        "5/minute", burst=7, tiers={"a": "9/minute", "b": "9/minute burst 3", "c": "0/minute"}
    )
    assert [rule.quota_for(tier).burst for tier in "abc"] == [7, 3, None]


# --- Identity --------------------------------------------------------------------------------------------------------


@every_kind
def test_a_changed_limit_or_tier_keeps_the_state(make: Make) -> None:
    first, second = make("5/minute", name="x"), make("6/minute", name="x", tiers={"pro": "7/minute"})
    assert first.identity == second.identity


def test_a_changed_kind_period_name_or_grid_is_a_new_state() -> None:
    rules = [
        fixed_window("5/minute", name="x"),
        sliding_log("5/minute", name="x"),
        token_bucket("5/minute", name="x"),
        sliding_window("5/minute", name="x"),
        sliding_window("5/hour", name="x"),
        sliding_window("5/minute", name="y"),
        sliding_window("5/minute", name="x", buckets=61),
        sliding_window("5/minute", name="x", strict=False),
    ]
    assert len({rule.identity for rule in rules}) == len(rules)


def test_names_cannot_make_two_identities_equal() -> None:
    """A name may contain the separators of an identity."""
    window = sliding_window("5/minute", name="x")
    odd = fixed_window("5/minute", name=window.identity.split("/", 2)[2])
    assert odd.identity != window.identity


# --- Invalid rules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"buckets": 0}, "buckets must be a whole number"),
        ({"buckets": 100_001}, "buckets must be a whole number"),
        ({"buckets": True}, "buckets must be a whole number"),
        ({"buckets": 60.0}, "buckets must be a whole number"),
        ({"scope": ""}, "a scope, like 'user' or .* is text, not ''"),
        ({"scope": ["user", "ip"]}, "a scope, like 'user' or .* is text, not \\['user'"),
        ({"unit": None}, "a unit, like 'tokens', is text, not None"),
        ({"name": ""}, "a rule's name is text"),
        ({"name": 5}, "a rule's name is text"),
    ],
)
def test_invalid_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sliding_window("5/minute", **arguments)


@pytest.mark.parametrize(
    ("make", "example"),
    [
        (fixed_window, "'5/day'"),
        (sliding_window, "'5/day'"),
        (sliding_log, "'5/day'"),
        (token_bucket, "'5/day'"),
        (partial(token_bucket, burst=9), "'5/day burst 9'"),
        (calendar, "'5/day'"),
        (lambda quota, **options: concurrent(5, lease="60s", **options), "5"),
    ],
)
@pytest.mark.parametrize("tiers", [["pro"], "pro", [], 5, {5: "9/day"}, {None: "9/day"}], ids=repr)
def test_tiers_must_be_a_mapping_by_name(make: Callable[..., Rule], example: str, tiers: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        make("5/day", tiers=tiers)
    assert str(caught.value) == (
        f"tiers is a mapping from names to quotas, like {{'pro': {example}}}, not {tiers!r}"
    )


def test_error_names_the_invalid_tier_of_a_rule_with_a_burst() -> None:
    with pytest.raises(ConfigError, match=r"^tier 'pro': a quota is text, not 9"):
        token_bucket("5/minute", burst=9, tiers={"pro": 9})  # type: ignore[dict-item]


@pytest.mark.parametrize("timezone", [["UTC"], ZoneInfo("UTC"), {}, ""], ids=repr)
def test_time_zone_must_be_a_name(timezone: Any) -> None:
    with pytest.raises(ConfigError, match="a time zone is a name like 'Europe/Berlin', not "):
        calendar("5/day", timezone=timezone)


def test_members_of_an_enumeration_can_be_names() -> None:
    """Compiled code takes plain text only."""
    named = StrEnum("named", {"name": "login", "scope": "user", "unit": "tokens", "tier": "pro"})
    rule = sliding_window(
        "5/minute",
        name=named["name"],
        scope=named["scope"],
        unit=named["unit"],
        tiers={named["tier"]: "9/minute"},
    )
    limiter = Limiter(rule, name=named["name"], store=MemoryStore())
    assert limiter.hit({"user": "ada"}, {"tokens": 2}, tier=named["tier"]).remaining == 7


def test_text_with_a_burst_is_a_token_bucket_and_other_text_a_sliding_window() -> None:
    rules = rules_from(["5/minute; 50/hour", "10/s burst 20", fixed_window("3/day")])
    assert [rule.kind for rule in rules] == [
        "sliding_window",
        "sliding_window",
        "token_bucket",
        "fixed_window",
    ]
    assert [rule.quota.limit for rule in rules] == [5, 50, 10, 3]


def test_rules_with_the_same_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two rules are called 'per-minute'"):
        Limiter("5/minute", "6/minute")
    with pytest.raises(ConfigError, match="two rules are called 'x'"):
        Limiter(fixed_window("5/minute", name="x"), sliding_log("5/hour", name="x"))
    Limiter("5/minute", sliding_window("6/minute", name="other"))


def test_rules_of_two_kinds_with_one_default_name_get_their_kind_appended() -> None:
    limiter = Limiter("5/minute", fixed_window("3/minute"), "9/hour")
    assert [rule.name for rule in limiter.rules] == [
        "per-minute-sliding-window",
        "per-minute-fixed-window",
        "per-hour",
    ]
    assert limiter.rules == Limiter(*limiter.rules).rules


def test_rule_keeps_its_state_when_its_default_name_is_extended() -> None:
    alone, together = Limiter("5/minute").rules, Limiter("5/minute", fixed_window("3/minute")).rules
    assert alone[0].name != together[0].name
    assert alone[0].identity == together[0].identity


def test_a_given_name_is_part_of_the_state_identity() -> None:
    assert sliding_window("5/minute", name="x").identity != sliding_window("5/minute").identity


def test_rules_with_the_same_state_are_refused() -> None:
    with pytest.raises(ConfigError, match="two rules are called"):
        Limiter("5/minute", sliding_window("6/minute", name="per-minute-sliding-window"))


def test_scoped_and_unscoped_rules_cannot_be_mixed() -> None:
    with pytest.raises(ConfigError, match=r"'per-minute' has no scope but 'per-hour-user' has one"):
        Limiter("5/minute", sliding_window("5/hour", scope="user"))
    Limiter("5/minute", sliding_window("5/hour", scope="*"))
    Limiter(sliding_window("5/hour", scope="user"), sliding_window("5/hour", scope="*"))


@pytest.mark.parametrize("wrong", [5, None, Quota(5, 60_000_000), ["5/minute"]])
def test_rule_must_be_text_or_a_rule(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="a rule is text like '5/minute' or"):
        Limiter(wrong)


# --- Conversion to algorithms ----------------------------------------------------------------------------------------


def test_rules_are_converted_to_algorithms_with_whole_numbers() -> None:
    assert algorithm_for(fixed_window("5/minute", name="x")) == FixedWindow("x", 5, 60_000_000)
    assert algorithm_for(sliding_log("5/minute", name="x")) == SlidingWindow("x", 5, 1, 60_000_000)
    strict = sliding_window("10/s", name="x")
    assert algorithm_for(strict) == SlidingWindow("x", 10, 16_667, 1_016_667)
    lenient = sliding_window("10/s", name="x", strict=False)
    assert algorithm_for(lenient) == SlidingWindow("x", 10, 16_667, 1_000_000)
    assert algorithm_for(strict, Quota(7, 1_000_000)) == SlidingWindow("x", 7, 16_667, 1_016_667)


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("60/minute", (60, 1, 1_000_000, 1)),  # 1 unit = 1,000,000 parts, 1 drains per microsecond
        ("7/minute", (7, 7, 60_000_000, 1)),
        ("1000000/s", (1_000_000, 1, 1, 1)),
        ("3000000/s", (3_000_000, 3, 1, 1)),
        ("1/hour", (1, 1, 3_600_000_000, 1)),
        ("1/3601s", (1, 1, 3_601_000, 1000)),  # over an hour it counts in milliseconds
        ("0/minute", (0, 0, 1, 1)),
        ("5/minute burst 9", (9, 1, 12_000_000, 1)),
    ],
)
def test_a_token_bucket_drains_whole_parts_per_tick(quota: str, expected: tuple[int, int, int, int]) -> None:
    assert algorithm_for(token_bucket(quota, name="x")) == TokenBucket("x", *expected)


def test_token_bucket_above_the_exact_range_is_refused_at_creation() -> None:
    largest = MAX_UNITS // 3_600_000_000
    Limiter(token_bucket(f"1/hour burst {largest}"))
    with pytest.raises(ConfigError, match=r"cannot be counted exactly .* use a rounder limit"):
        Limiter(token_bucket(f"1/hour burst {largest + 1}"))
    with pytest.raises(ConfigError, match="cannot be counted exactly"):
        Limiter(token_bucket("1/hour", tiers={"pro": f"1/hour burst {largest + 1}"}))


def test_tiers_with_incompatible_bursts_are_refused_at_creation() -> None:
    """10 million units do not fit into 2^53 parts of 2400001/hour: cut off there, callers would get units for free."""
    Limiter(token_bucket("2400000/hour", tiers={"pro": "10000000/hour"}))
    for quota, tier in (("2400001/hour", "10000000/hour"), ("10000000/hour", "2400001/hour")):
        with pytest.raises(
            ConfigError, match=r"'2400001/hour' cannot be counted exactly .*: burst 10000000 x"
        ):
            Limiter(token_bucket(quota, tiers={"pro": tier}))


def test_a_concurrent_rule_has_limits_and_a_lease() -> None:
    rule = concurrent(5, lease="90s", scope="user", tiers={"pro": 20}, unit="slots")
    assert (rule.kind, rule.quota, rule.tiers["pro"].limit) == ("concurrent", Quota(5, 90_000_000), 20)
    assert (rule.name, str(rule)) == ("concurrent-user-slots", "concurrent-user-slots (5 at once)")
    assert rule.identity == concurrent(9, lease=1, scope="user", unit="slots").identity, (
        "a changed lease keeps what is held"
    )
    assert pickle.loads(pickle.dumps(rule)) == copy.deepcopy(rule) == rule
    for limit in (True, 5.0, "5", -1, 2**53):
        with pytest.raises(ConfigError):
            concurrent(limit, lease="60s")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tier 'pro'"):
        concurrent(5, lease="60s", tiers={"pro": "20/minute"})  # type: ignore[dict-item]


def test_a_calendar_rule_has_a_span_and_a_time_zone() -> None:
    rule = calendar("10000/month", timezone="Europe/Berlin", tiers={"pro": "50000/month"})
    assert (rule.span, rule.timezone, rule.quota.limit, rule.tiers["pro"].limit) == (
        "month",
        "Europe/Berlin",
        10000,
        50000,
    )
    assert (rule.name, str(rule)) == ("calendar-month", "calendar-month (10000/month)")
    assert rule.identity != calendar("10000/month", name=rule.name).identity, "another zone has other windows"
    assert rule.identity == calendar("1/month", timezone="Europe/Berlin").identity
    assert pickle.loads(pickle.dumps(rule)) == copy.deepcopy(rule) == rule
    with pytest.raises(ConfigError, match="tier 'pro'"):
        calendar("10000/month", tiers={"pro": "50000/day"})
    with pytest.raises(ConfigError, match=r"expected day, week, month or year.*for example '1000/day'"):
        calendar("5/hour")


@pytest.mark.parametrize("rule", [concurrent(5, lease="60s"), calendar("5/day")], ids=lambda rule: rule.kind)
def test_a_store_refuses_unsupported_kinds_of_rules_when_it_is_bound(rule: Rule) -> None:
    with pytest.raises(ConfigError, match=f"does not support {rule.kind} rules"):
        AsyncLimiter(rule, name="few", store=KVStore(MemoryKV()))
