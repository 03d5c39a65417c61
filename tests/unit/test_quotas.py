"""Quotas as an argument of a call, or from a function of key and tier."""

from __future__ import annotations

import time
from typing import Any

import pytest

from headgate import (
    AsyncLimiter,
    ConfigError,
    Limiter,
    Quota,
    calendar,
    concurrent,
    fixed_window,
    token_bucket,
)
from headgate.quotas import MOST_KEPT
from headgate.stores.base import QUOTAS_KEPT, plain_tiers
from headgate.stores.request import Request
from headgate.testing import FakeClock, ReferenceStore


def limiter(*rules: Any, clock: FakeClock | None = None, **options: Any) -> Limiter:
    return Limiter(*rules, name="quotas", store=ReferenceStore(clock=clock or FakeClock()), **options)


@pytest.mark.parametrize(
    ("quota", "message"),
    [
        ("100/hour", r"'100/hour'.* period of '5/minute'"),
        ("100/minute burst 5", "no burst"),
        ("100/minut", "unit of time"),
        (100, "quota is text"),
        ({"typo": "100/minute"}, "no rule is called 'typo'; the rules are 'per-minute'"),
        ({"per-minute": "1/hour"}, "period"),
    ],
)
def test_a_quota_that_does_not_fit_the_rule_is_refused(quota: Any, message: str) -> None:
    own = limiter(fixed_window("5/minute"))
    for call in (own.hit, own.check, own.hold, own.record, own.wait):
        with pytest.raises(ConfigError, match=message):
            call("a", quota=quota)


def test_one_quota_for_several_rules_is_refused() -> None:
    own = limiter(fixed_window("5/minute"), fixed_window("9/hour"))
    with pytest.raises(ConfigError, match="mapping by their names"):
        own.hit("a", quota="5/minute")
    answer = own.check("a", 0, quota={"per-hour": "20/hour"})
    assert [result.limit for result in answer.results] == [5, 20]
    with pytest.raises(ConfigError, match="without rules"):
        Limiter().hit("a", quota="5/minute")


def test_quota_argument_has_the_format_of_its_kind_of_rule() -> None:
    assert limiter(concurrent(2, lease="1m")).check("a", 0, quota=9).limit == 9
    assert limiter(calendar("2/month")).check("a", 0, quota="9/month").limit == 9
    assert limiter(token_bucket("2/minute")).check("a", 0, quota="9/minute burst 30").limit == 30
    for rule, quota in ((concurrent(2, lease="1m"), "9/minute"), (calendar("2/month"), "9/day")):
        with pytest.raises(ConfigError):
            limiter(rule).check("a", 0, quota=quota)


def test_record_and_wait_use_the_quota_of_the_call() -> None:
    clock = FakeClock()
    own = limiter(fixed_window("1/minute"), clock=clock)
    own.record("a", 5, quota="9/minute")
    assert own.wait("a", 4, quota="9/minute").remaining == 0
    assert not own.check("a")


def test_quota_function_returns_the_quota_of_a_key_and_tier() -> None:
    asked = []

    def quota(key: Any, tier: str | None) -> str | None:
        asked.append((key, tier))
        return "50/minute" if key == "vip" else None

    clock = FakeClock()
    own = limiter(fixed_window("5/minute", tiers={"pro": "9/minute"}), clock=clock, quotas=quota)
    assert [own.check(key, 0).limit for key in ("vip", "ann", "vip", "ann")] == [50, 5, 50, 5]
    assert own.check("ann", 0, tier="pro").limit == 9
    assert own.check("vip", 0, quota="7/minute").limit == 7
    assert asked == [("vip", None), ("ann", None), ("ann", "pro")]
    clock.advance(60)
    assert own.hold("vip", 6).decision.limit == 50
    assert asked[3:] == [("vip", None)]


def test_quota_function_is_called_every_time_without_caching() -> None:
    limits = iter("123")
    own = limiter(fixed_window("5/minute"), quotas=lambda key, tier: f"{next(limits)}/minute", quotas_for=0)
    assert [own.check("a", 0).limit for _ in range(3)] == [1, 2, 3]


def test_invalid_result_of_a_quota_function_raises_at_every_call() -> None:
    own = limiter(fixed_window("5/minute"), quotas=lambda key, tier: "5/hour")
    for _ in range(2):
        with pytest.raises(ConfigError, match="period"):
            own.hit("a")


async def test_quota_function_may_be_a_coroutine_function(tmp_path: Any) -> None:
    async def quota(key: Any, tier: str | None) -> dict[str, str]:
        return {"per-minute": "50/minute"}

    url = f"sqlite:///{tmp_path}/limits.db"
    async with AsyncLimiter(fixed_window("5/minute"), name="quotas", store=url, quotas=quota) as own:
        assert (await own.hit("a", 6)).remaining == 44
        async with own.hold("a", 4) as hold:
            assert hold.decision.remaining == 40


def test_quota_function_distinguishes_scoped_keys() -> None:
    asked = []
    own = limiter(fixed_window("5/minute", scope="user"), quotas=lambda key, tier: asked.append(key))
    for user in ("ann", "bob", "ann"):
        own.check({"user": user})
    with pytest.raises(ConfigError, match="no entry for 'user'"):
        own.check({"usr": "ann"})
    assert asked == [{"user": "ann"}, {"user": "bob"}]


def test_callers_of_a_shared_counter_have_separate_quotas() -> None:
    own = limiter(
        fixed_window("5/minute", scope="*"),
        quotas=lambda key, tier: {"ann": "9/minute"}.get(key if isinstance(key, str) else ""),
    )
    keys: list[Any] = ["ann", "bob", None, {"user": "ann"}, "ann"]
    assert [own.check(key, 0).limit for key in keys] == [9, 5, 5, 5, 9]


def test_quota_caches_are_bounded() -> None:
    own = limiter(fixed_window("5/minute"), quotas=lambda key, tier: None)
    for number in range(MOST_KEPT + 10):
        own.check(str(number))
    assert len(own.gate._quotas._kept) == MOST_KEPT  # type: ignore[attr-defined]
    tiers = plain_tiers((fixed_window("5/minute"),))
    for limit in range(QUOTAS_KEPT + 10):
        tiers.for_request(Request("peek", "ann", (0,), quotas=(Quota(limit, 60_000_000),)))
    assert tiers._by_quotas.cache_info().currsize == QUOTAS_KEPT


def test_a_quota_that_cannot_be_counted_is_refused() -> None:
    own = limiter(token_bucket("10000000/hour"))
    with pytest.raises(ConfigError, match="cannot be counted exactly"):
        own.hit("a", quota="2400001/hour")


def test_quota_cache_uses_the_clock_of_the_limiter() -> None:
    assert time.monotonic() > 0
    clock = FakeClock()
    answers = iter(("1/minute", "2/minute"))
    own = limiter(fixed_window("5/minute"), clock=clock, quotas=lambda key, tier: next(answers), quotas_for=5)
    assert own.check("a", 0).limit == 1
    clock.advance(4.999999)
    assert own.check("a", 0).limit == 1
    clock.advance(0.000001)
    assert own.check("a", 0).limit == 2
