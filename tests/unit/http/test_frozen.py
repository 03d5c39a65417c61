"""Limits of an application on a clock that the test controls."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate import ConfigError, Limiter
from headgate.http.limit import RequestLimit
from headgate.http.testing import FreshLimits, fresh_limits, limits_off
from headgate.policy import LivePolicy, parse_policy


def test_fixture_controls_every_limit(headgate_limits: FreshLimits, tmp_path: Path) -> None:
    with Limiter("1/minute", name="x", store=f"sqlite:///{tmp_path}/limits.db") as limiter:
        limit = RequestLimit(limiter)
        assert [bool(limit.version.limiter.hit("a")) for _ in range(2)] == [True, False]
        headgate_limits.advance(61)
        assert limit.version.limiter.hit("a")
        headgate_limits.reset()
        assert limit.version.limiter.hit("a")


def test_fixture_limits_are_enabled_again_after_limits_off(headgate_limits: FreshLimits) -> None:
    limit = RequestLimit(Limiter("0/minute"))
    with limits_off():
        assert limit.version.limiter.hit("a")
    assert not limit.version.limiter.hit("a")


def test_limit_created_in_nested_blocks_follows_both() -> None:
    with limits_off():
        with fresh_limits():
            limit = RequestLimit(Limiter("0/minute"))
            assert not limit.version.limiter.hit("a")
        assert limit.version.limiter.hit("a")
    assert not limit.version.limiter.hit("a")


def test_quota_function_applies_in_fresh_limits() -> None:
    limit = RequestLimit(Limiter("0/minute", quotas=lambda key, tier: "2/minute" if key == "a" else None))
    with fresh_limits():
        assert limit.version.limiter.check("a", 2)
        assert not limit.version.limiter.check("b")


def test_policy_tiers_and_overrides_apply_in_fresh_limits() -> None:
    policy = """
    [limiters.api]
    rules = [{ quota = "1/minute", name = "own", tiers = { free = "2/minute" } }]
    default_tier = "free"
    [[limiters.api.overrides]]
    key = "vip"
    rules = { own = "3/minute" }
    """
    limit = RequestLimit(LivePolicy(parse_policy(policy))["api"])
    limit.version.limiter.hit("a", 2)
    with fresh_limits():
        assert limit.version.limiter.check("a", 2)
        assert limit.version.limiter.check("vip", 3)


def test_real_clock_cannot_be_advanced() -> None:
    with fresh_limits() as limits, pytest.raises(ConfigError, match="FakeClock"):
        limits.advance(1)
