"""Answers of a limiter while its store is unavailable."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import (
    ConfigError,
    CostTooHigh,
    Decision,
    Quota,
    Rule,
    StoreOverloaded,
    StoreUnavailable,
    fixed_window,
    sliding_window,
    token_bucket,
)
from headgate.algorithms import algorithm_for
from headgate.decision import UNLIMITED
from headgate.outage.breaker import Breaker
from headgate.outage.fallback import FallbackLimiter
from headgate.outage.policies import OnOverload, OnStoreError, local
from headgate.stores.base import Answer, Operation
from headgate.stores.request import Request

ERROR = StoreUnavailable("it is gone")


def fallback(policy: OnStoreError, *rules: Rule) -> FallbackLimiter:
    rules = rules or (sliding_window("8/minute"), token_bucket("20/hour"))
    return FallbackLimiter("limiter", rules, policy, Breaker("store"))


def hit(it: FallbackLimiter, cost: int = 1, *, key: Any = "alice", tier: str | None = None) -> Decision:
    return decide(it, "hit", cost, key=key, tier=tier)[0]


def decide(
    it: FallbackLimiter, operation: Operation, cost: int = 1, *, key: Any = "alice", tier: str | None = None
) -> Answer:
    return it.decide(Request(operation, key, cost, tier), ERROR)


@pytest.mark.parametrize(("policy", "is_admitted"), [("open", True), ("closed", False)])
def test_limiter_without_local_rules_follows_its_policy(policy: Any, is_admitted: bool) -> None:
    decision = hit(FallbackLimiter("limiter", (), policy, Breaker("store")))
    assert (decision.allowed, decision.degraded) == (is_admitted, True)
    assert bool(decision.retry_after) is not is_admitted


def test_closed_refuses_with_retry_after() -> None:
    decision = hit(fallback("closed"))
    assert not decision
    assert decision.degraded
    assert decision.retry_after == 1
    assert hit(fallback("closed"), 0).allowed


def test_raise_policy_raises_the_store_error() -> None:
    it = fallback("raise")
    for operation in get_args(Operation):
        with pytest.raises(StoreUnavailable, match="gone"):
            decide(it, operation)
    with pytest.raises(StoreUnavailable):
        it.raise_if_asked(ERROR)


@pytest.mark.parametrize("policy", ["open", "closed", local(1.0)])
def test_zero_limit_refuses_in_an_outage_too(policy: OnStoreError) -> None:
    decision = hit(fallback(policy, fixed_window("0/minute"), fixed_window("5/hour")))
    assert not decision
    assert decision.retry_after is None


@pytest.mark.parametrize("policy", ["open", "closed", "raise", local()])
def test_invalid_calls_raise_in_an_outage_too(policy: OnStoreError) -> None:
    it = fallback(policy)
    with pytest.raises(CostTooHigh):
        hit(it, 9)
    with pytest.raises(ConfigError):
        hit(it, -1)
    with pytest.raises(ConfigError):
        hit(it, key={"user": "alice"})
    with pytest.raises(ConfigError):
        decide(it, "record", key=None)
    with pytest.raises(ConfigError):
        decide(it, "record", -1)


@pytest.mark.parametrize("policy", ["open", "closed"])
def test_open_and_closed_do_not_count_holds_or_records(policy: OnStoreError) -> None:
    it = fallback(policy)
    decision, receipts = decide(it, "hold")
    assert decision.allowed is (policy == "open")
    assert receipts is None
    assert decide(it, "record") == (UNLIMITED.as_degraded(), None)
    assert it.health.degraded == 2
    it.raise_if_asked(ERROR)
    it.reset("alice")
    assert decide(it, "peek")[0].allowed is (policy == "open")


# --- Limiting in memory ----------------------------------------------------------------------------------------------


def test_local_applies_its_share_to_each_limit() -> None:
    it = fallback(local(0.25))
    decisions = [hit(it) for _ in range(5)]
    assert [decision.allowed for decision in decisions] == [True, True, False, False, False]
    assert all(decision.degraded for decision in decisions)
    assert [result.limit for result in decisions[0].results] == [2, 5]
    assert hit(it, key="bob")


def test_local_refuses_a_cost_above_its_share() -> None:
    it = fallback(local(0.25))
    decision = hit(it, 8)
    assert not decision
    assert decision.degraded
    assert decision.retry_after == 1
    assert [bool(hit(it)) for _ in range(3)] == [True, True, False]


def test_fallback_does_not_refund_receipts_of_the_store() -> None:
    it = fallback(local())
    assert not it.refund(((b"key", (1, 2, 3)),), 1, None)
    assert not it.refund((), 1, None)


def test_local_receipts_of_another_limiter_are_not_sent_to_the_store() -> None:
    _, receipts = decide(fallback(local(1.0)), "hold")
    assert receipts is not None
    assert fallback("open").refund(receipts, 1, None)


@pytest.mark.parametrize(
    ("share", "limit", "expected"),
    [(0.3, 10, 3), (0.1, 10, 1), (0.7, 10, 7), (0.29, 100, 29), (0.25, 3, 0), (1, 7, 7)],
)
def test_share_has_no_floating_point_error(share: float, limit: int, expected: int) -> None:
    it = fallback(local(share), fixed_window(Quota(limit, 60_000_000)))
    assert sum(hit(it).allowed for _ in range(limit)) == expected


def test_local_applies_its_share_to_the_burst() -> None:
    it = fallback(local(0.5), token_bucket("10/minute", burst=4))
    assert [bool(hit(it)) for _ in range(3)] == [True, True, False]
    tiny = fallback(local(0.1), token_bucket("100/minute", burst=4))
    assert not hit(tiny)


quotas = st.builds(
    Quota,
    st.integers(1, 10**12),
    st.sampled_from([1_000, 1_000_000, 3_600_000_000, 86_400_000_000, 366 * 86_400_000_000]),
    st.none() | st.integers(1, 10**6),
)


@given(quotas, st.floats(0.001, 1))
def test_local_share_of_every_valid_token_bucket_is_valid(quota: Quota, share: float) -> None:
    rule = token_bucket(quota)
    try:
        algorithm_for(rule)
    except ConfigError:
        return
    it = FallbackLimiter("limiter", (rule,), local(share), Breaker("store"))
    decision = decide(it, "peek", 0)[0]
    assert decision.limit is not None
    assert decision.limit <= (quota.limit if quota.burst is None else quota.burst) * share + 1e-3


# --- Overload --------------------------------------------------------------------------------------------------------


OVERLOAD = StoreOverloaded("it was not sent")


@pytest.mark.parametrize("policy", ["open", "closed", "raise", local(1.0)])
def test_overload_is_refused_briefly_under_every_policy(policy: OnStoreError) -> None:
    it = fallback(policy)
    decision, receipts = it.decide(Request("hold", "alice", 1), OVERLOAD)
    assert not decision
    assert decision.degraded
    assert decision.retry_after == 0.1
    assert receipts is None
    assert it.health.degraded == 1
    assert it.decide(Request("hit", "alice", 0), OVERLOAD)[0].allowed
    with pytest.raises(CostTooHigh):
        it.decide(Request("hit", "alice", 9), OVERLOAD)


def test_overload_can_use_the_failure_policy() -> None:
    def answer(policy: OnStoreError, on_overload: OnOverload) -> Decision:
        it = FallbackLimiter("limiter", (sliding_window("8/minute"),), policy, Breaker("store"), on_overload)
        return it.decide(Request("hit", "alice"), OVERLOAD)[0]

    assert answer("open", "policy").allowed
    assert answer(local(), "policy").remaining == 1
    assert answer("closed", "policy").retry_after == 1
    with pytest.raises(StoreOverloaded):
        answer("raise", "policy")


def test_record_in_overload_follows_the_failure_policy() -> None:
    """A record that overload prevents is treated as in an outage: counted locally, raised or lost."""
    it = fallback(local(0.5), sliding_window("8/minute"))
    it.decide(Request("record", "alice", 4), OVERLOAD)
    assert not hit(it)
    with pytest.raises(StoreOverloaded):
        fallback("raise").decide(Request("record", "alice", 4), OVERLOAD)
