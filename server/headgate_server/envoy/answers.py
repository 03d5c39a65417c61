"""From decisions to the response. Pure.

A status has the figures of the most restrictive rule of its descriptor. For a refusal `duration_until_reset` is the time
after which the same request would be admitted, for an admission the time until the counter is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headgate import Decision, Rule
from headgate.clock import MICROSECONDS
from headgate.quota import Quota
from headgate_server.envoy.matching import PERIODS_US
from headgate_server.envoy.messages import OK, OVER_LIMIT, RateLimitResponse

LARGEST = 2**32 - 1
"""The largest number in a status."""

_UNITS = {period_us: unit for unit, period_us in PERIODS_US.items()}
_UNITS_OF_SPANS = {"day": 4, "week": 7, "month": 5, "year": 6}


def answer(
    number: int, statuses: Mapping[int, Mapping[str, Any]], fields: Iterable[tuple[str, str]] = ()
) -> Any:
    """Return a `RateLimitResponse`.

    Args:
        number: The number of descriptors.
        statuses: The statuses of descriptors by place; the others are OK.
        fields: Header fields for the response to the client.
    """
    response = RateLimitResponse(overall_code=OK)
    for place in range(number):
        status = statuses.get(place, _OK)
        response.statuses.add(**status)
        if status["code"] == OVER_LIMIT:
            response.overall_code = OVER_LIMIT
    for name, value in fields:
        response.response_headers_to_add.add(key=name.lower(), value=value)
    return response


_OK = {"code": OK}
REFUSED: Mapping[str, Any] = {"code": OVER_LIMIT}
"""A refusal without figures."""


def status(decision: Decision, rules: Mapping[str, tuple[Rule, Quota]]) -> Mapping[str, Any]:
    """Return the status of a descriptor.

    Args:
        decision: The decision of all descriptors.
        rules: The rules of this descriptor and their quotas, by name.
    """
    own = [pair for pair in zip(decision.names, decision.verdicts, strict=True) if pair[0] in rules]
    if not own:
        return _OK if decision.allowed else REFUSED
    names, verdicts = zip(*own, strict=True)
    part = Decision.make(names, verdicts)
    left = 0 if part.remaining is None else min(part.remaining, LARGEST)
    found: dict[str, Any] = {"code": OK if part.allowed else OVER_LIMIT, "limit_remaining": left}
    until_us = part.reset_after_us if part.allowed else part.retry_after_us
    if until_us is not None:
        seconds, rest_us = divmod(until_us, MICROSECONDS)
        found["duration_until_reset"] = {"seconds": seconds, "nanos": rest_us * 1_000}
    if part.rule is not None:
        found["current_limit"] = shown_limit(*rules[part.rule])
    return found


def shown_limit(rule: Rule, quota: Quota) -> dict[str, Any]:
    """Return a quota as a `RateLimit`; a period that is none of Envoy's units has the unit 0, unknown."""
    unit = _UNITS_OF_SPANS[rule.span] if rule.span is not None else _UNITS.get(quota.period_us, 0)
    return {"requests_per_unit": min(quota.limit, LARGEST), "unit": unit, "name": rule.name}
