"""Failure policies: validation, and conversion to and from data."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import ConfigError
from headgate.outage.breaker import Breaker
from headgate.outage.fallback import FallbackLimiter
from headgate.outage.policies import (
    OnStoreError,
    check_overload,
    check_policy,
    local,
    policy_from_data,
    policy_to_data,
)
from headgate.rules import fixed_window

shares = st.floats(0, 1, exclude_min=True)
policies: st.SearchStrategy[OnStoreError] = st.one_of(
    st.sampled_from(["open", "closed", "raise"]), shares.map(local)
)


@given(policies)
def test_policy_round_trips_through_data(policy: OnStoreError) -> None:
    assert policy_from_data(json.loads(json.dumps(policy_to_data(policy)))) == policy


def test_very_small_local_share_is_kept() -> None:
    policy = policy_from_data({"local": 1e-7})
    assert policy == local(1e-7)
    FallbackLimiter("limiter", (fixed_window("5/minute"),), policy, Breaker("store"))


@pytest.mark.parametrize(
    "data",
    ["Open", "local", "local 25%", 0.25, None, {}, {"local": 2}, {"local": "1"}, {"local": 1, "x": 1}, []],
)
def test_invalid_policy_data_is_refused(data: Any) -> None:
    with pytest.raises(ConfigError):
        policy_from_data(data)


@pytest.mark.parametrize("policy", ["Open", "local", 0.25, None])
def test_unknown_policy_is_refused(policy: Any) -> None:
    with pytest.raises(ConfigError, match="on_store_error"):
        check_policy(policy)


@pytest.mark.parametrize("policy", ["open", None, 1])
def test_unknown_overload_policy_is_refused(policy: Any) -> None:
    with pytest.raises(ConfigError, match="on_overload"):
        check_overload(policy)
