"""Costs by unit: the charge of each rule, and invalid costs."""

from __future__ import annotations

from typing import Any

import pytest

from headgate import (
    ConfigError,
    Limiter,
    concurrent,
    fixed_window,
    token_bucket,
)
from headgate.costs import Units, total
from headgate.rules import Rule
from headgate.testing import FakeClock, ReferenceStore

RULES = (fixed_window("10/minute"), token_bucket("1000/minute", unit="tokens"), fixed_window("5/day"))


def limiter(*rules: Rule) -> Limiter:
    return Limiter(*(rules or RULES), name="model", store=ReferenceStore(clock=FakeClock()))


@pytest.mark.parametrize(
    ("cost", "costs"),
    [
        (3, 3),
        ({"tokens": 800}, (1, 800, 1)),
        ({"tokens": 0, "requests": 2}, (2, 0, 2)),
        ({"tokens": 1}, 1),
    ],
)
def test_a_cost_by_unit_is_one_number_per_rule(cost: Any, costs: Any) -> None:
    assert Units("model", RULES).costs(cost) == costs


def test_end_of_a_hold_frees_places_and_settles_other_units() -> None:
    units = Units("model", (*RULES, concurrent(3, lease=60)))
    assert units.difference((2, 800, 2, 1), (3, 500, 2, 1)) == ((0, 300, 0, 1), (1, 0, 0, 0))
    assert units.without_places((2, 800, 2, 1)) == (2, 800, 2, 0)
    assert units.only_places((2, 800, 2, 1)) == (0, 0, 0, 1)


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        ({"requests": 1}, "limiter 'model' also counts 'tokens': add it to the cost {'requests': 1}"),
        ({}, "'tokens'"),
        ({"tokens": 1, "tokns": 1}, "does not count 'tokns'; it counts 'requests', 'tokens'"),
        ({"tokens": True}, "whole number"),
        ({"tokens": -1}, "whole number"),
        ({"tokens": 1.5}, "whole number"),
        ({"tokens": "1"}, "whole number"),
        ({"tokens": 2**53}, "whole number"),
        ((1, 2, True), "whole number"),
        ([1], "whole number"),
    ],
)
def test_invalid_cost_by_unit_is_refused_and_charges_nothing(cost: Any, message: str) -> None:
    own = limiter()
    for call in (own.hit, own.check, own.hold, own.record):
        with pytest.raises(ConfigError, match=message):
            call("a", cost)
    assert [result.remaining for result in own.check("a", 0).results] == [10, 1000, 5]


def test_limiter_of_requests_accepts_a_cost_by_name() -> None:
    own = limiter(fixed_window("10/minute"))
    assert own.hit("a", {"requests": 4}).remaining == 6
    assert own.hit("a", {}).remaining == 5
    with pytest.raises(ConfigError, match="does not count 'tokens'"):
        own.hit("a", {"tokens": 4})


def test_a_limiter_without_rules_admits_any_unit() -> None:
    assert Limiter().hit("a", {"tokens": 5})


def test_only_tokens_are_counted_if_no_rule_counts_requests() -> None:
    own = limiter(token_bucket("100/minute", unit="tokens"))
    assert own.hit("a", {"tokens": 30, "requests": 9}).remaining == 70


def test_settling_some_units_keeps_the_other_units() -> None:
    own = limiter()
    hold = own.hold("a", {"tokens": 500, "requests": 3})
    assert hold.cost == {"requests": 3, "tokens": 500}
    with pytest.raises(ConfigError, match="'tokns'"):
        hold.settle({"tokns": 5})
    assert hold.settle({"tokens": 700}) == {"requests": 3, "tokens": 700}
    assert hold.final == {"requests": 3, "tokens": 700}
    assert [result.remaining for result in own.check("a", 0).results] == [7, 300, 2]


@pytest.mark.parametrize("capacity", [0, 5])
def test_cost_by_unit_may_equal_the_limit(capacity: int) -> None:
    own = limiter(fixed_window("10/minute"), token_bucket(f"{capacity}/minute", unit="tokens"))
    assert own.hit("a", {"tokens": 5}).allowed == bool(capacity)


def test_total_adds_units_up() -> None:
    assert (total(3), total({"tokens": 5, "requests": 1})) == (3, 6)
