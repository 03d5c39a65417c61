"""Errors: one base class, and they can be pickled."""

from __future__ import annotations

import copy
import pickle

import pytest

import headgate
from headgate import (
    ConfigError,
    CostTooHigh,
    Decision,
    HeadgateError,
    RateLimited,
    StoreConflict,
    StoreError,
    StoreMisconfigured,
    StoreOverloaded,
    StoreTimeout,
    StoreUnavailable,
)
from headgate.decision import Verdict

REFUSAL = Decision.make(("slow",), [Verdict(False, 5, 0, 20_000_000, 40_000_000)])


def test_public_errors_share_one_base_class() -> None:
    errors = [
        value for value in vars(headgate).values() if isinstance(value, type) and issubclass(value, Exception)
    ]
    assert all(issubclass(error, HeadgateError) for error in errors)
    assert issubclass(StoreUnavailable, StoreError)
    assert issubclass(StoreConflict, StoreError)
    assert issubclass(StoreOverloaded, StoreError)
    assert not issubclass(StoreOverloaded, StoreUnavailable), "the store may be well"
    assert issubclass(StoreTimeout, StoreUnavailable)


def test_misconfigured_store_is_a_config_error() -> None:
    assert issubclass(StoreMisconfigured, ConfigError)
    assert issubclass(StoreMisconfigured, StoreError)
    assert not issubclass(StoreMisconfigured, StoreUnavailable)


def test_config_errors_are_value_errors() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(CostTooHigh, ValueError)
    assert not issubclass(RateLimited, ValueError)


def test_cost_too_high_reports_the_capacity() -> None:
    error = CostTooHigh(7, 5, "slow")
    assert (error.cost, error.capacity, error.rule) == (7, 5, "slow")
    assert str(error) == (
        "a cost of 7 can never be admitted: rule 'slow' holds 5 at most; split the work or raise the limit"
    )


def test_rate_limited_error_contains_its_decision() -> None:
    error = RateLimited(REFUSAL)
    assert error.decision is REFUSAL
    assert str(error) == str(REFUSAL)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("no"),
        CostTooHigh(7, 5, "slow"),
        RateLimited(REFUSAL),
        StoreError("no"),
        StoreUnavailable("no"),
        StoreConflict("no"),
        StoreMisconfigured("no"),
        StoreOverloaded("no"),
        StoreTimeout("no"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_can_be_pickled_and_copied(error: HeadgateError) -> None:
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert vars(other) == vars(error)
