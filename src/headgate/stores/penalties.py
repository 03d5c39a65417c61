"""Penalties among the rules of a limiter: what all stores share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headgate.algorithms import Algorithm, Penalty
from headgate.rules import Rule
from headgate.stores.request import Request


def watched_by(rules: Sequence[Rule]) -> dict[int, tuple[int, ...]]:
    """Return for each penalty, by its index, the indices of the rules whose refusals it counts."""
    return {
        i: tuple(j for j, other in enumerate(rules) if other.is_rate and other.scope == rule.scope)
        for i, rule in enumerate(rules)
        if rule.kind == "penalty"
    }


def watching(algorithm: Algorithm, watched: tuple[int, ...]) -> Algorithm:
    """Return a penalty that counts the refusals of the rules with these indices."""
    assert isinstance(algorithm, Penalty)
    return replace(algorithm, watched=watched)


def has_penalty(rules: Sequence[Rule]) -> bool:
    """Return whether one of the rules is a penalty."""
    return any(rule.kind == "penalty" for rule in rules)


def with_penalty_costs(rules: Sequence[Rule], request: Request) -> Request:
    """Return the request with a cost of 1 for penalties if it costs units of any other rule, and with 0 if not.

    A hold that is open settles as usual, so a request that replaces it costs 0.
    """
    if isinstance(request.cost, int) and request.cost <= 1:
        return request
    costs = request.costs(len(rules))
    takes = any(cost for rule, cost in zip(rules, costs, strict=True) if rule.kind != "penalty")
    own = int(takes and request.replaces is None)
    return request.with_costs(
        tuple(own if rule.kind == "penalty" else cost for rule, cost in zip(rules, costs, strict=True))
    )
