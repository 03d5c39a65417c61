"""Limits of an application on a clock of the test's."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate import ConfigError, Limiter
from headgate.http.limit import RequestLimit
from headgate.http.testing import FreshLimits, fresh_limits, limits_off
from headgate.policy import LivePolicy, parse_policy


def test_the_fixture_reaches_every_limit(headgate_limits: FreshLimits, tmp_path: Path) -> None:
    with Limiter("1/minute", name="x", store=f"sqlite:///{tmp_path}/limits.db") as limiter:
        limit = RequestLimit(limiter)
        assert [bool(limit.version.limiter.hit("a")) for _ in range(2)] == [True, False]
        headgate_limits.advance(61)
        assert limit.version.limiter.hit("a")
        headgate_limits.reset()
        assert limit.version.limiter.hit("a")


def test_the_fixture_switches_limits_on_again(headgate_limits: FreshLimits) -> None:
    limit = RequestLimit(Limiter("0/minute"))
    with limits_off():
        assert limit.version.limiter.hit("a")
    assert not limit.version.limiter.hit("a")


def test_a_limit_made_in_a_block_within_a_block_is_in_both() -> None:
    with limits_off():
        with fresh_limits():
            limit = RequestLimit(Limiter("0/minute"))
            assert not limit.version.limiter.hit("a")
        assert limit.version.limiter.hit("a")
    assert not limit.version.limiter.hit("a")


def test_quotas_from_a_function_hold_in_a_block() -> None:
    limit = RequestLimit(Limiter("0/minute", quotas=lambda key, tier: "2/minute" if key == "a" else None))
    with fresh_limits():
        assert limit.version.limiter.check("a", 2)
        assert not limit.version.limiter.check("b")


def test_tiers_and_overrides_of_a_policy_hold_in_a_block() -> None:
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


def test_real_time_cannot_be_moved() -> None:
    with fresh_limits() as limits, pytest.raises(ConfigError, match="FakeClock"):
        limits.advance(1)
