"""From decisions to the response. Pure.

A status has the figures of the most restrictive rule of its descriptor. For a refusal `duration_until_reset` is the time
after which the same request would be admitted, for an admission the time until the counter is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from headgate import Rule
from headgate.clock import MICROSECONDS
from headgate.quota import Quota
from headgate_server.envoy.matching import PERIODS_US
from headgate_server.envoy.messages import OK, OVER_LIMIT, RateLimit, RateLimitResponse

Fields = tuple[bool, int, int, int | None, int | None]
"""A verdict as in `Decision.fields`: allowed, limit, remaining, retry and reset in microseconds."""

LARGEST = 2**32 - 1
"""The largest number in a status."""

_UNITS = {period_us: unit for unit, period_us in PERIODS_US.items()}
_UNITS_OF_SPANS = {"day": 4, "week": 7, "month": 5, "year": 6}


class Status(NamedTuple):
    """The status of a descriptor.

    Attributes:
        code: `OK` or `OVER_LIMIT`.
        limit: The limit of its most restrictive rule, a `RateLimit`; `None` without figures.
        left: The remaining units.
        until_us: Microseconds until the reset, or for a refusal until the same request is admitted; `None` for never.
    """

    code: int
    limit: Any = None
    left: int = 0
    until_us: int | None = None


ADMITTED = Status(OK)
"""An admission without figures."""

REFUSED = Status(OVER_LIMIT)
"""A refusal without figures."""


def answer(number: int, statuses: Mapping[int, Status], fields: Iterable[tuple[str, str]] = ()) -> Any:
    """Return a `RateLimitResponse`.

    Args:
        number: The number of descriptors.
        statuses: The statuses of descriptors by place; the others are OK.
        fields: Header fields for the response to the client.
    """
    response = RateLimitResponse()
    overall, add = OK, response.statuses.add
    for place in range(number):
        found = statuses.get(place, ADMITTED)
        if found.code == OVER_LIMIT:
            overall = OVER_LIMIT
        if found.limit is None:
            add(code=found.code)
            continue
        status = add(code=found.code, limit_remaining=found.left, current_limit=found.limit)
        if found.until_us is not None:
            duration = status.duration_until_reset
            duration.seconds = found.until_us // MICROSECONDS
            duration.nanos = found.until_us % MICROSECONDS * 1_000
    response.overall_code = overall
    add_field = response.response_headers_to_add.add
    for name, value in fields:
        add_field(key=name.lower(), value=value)
    return response


def status_of(verdicts: Sequence[Fields], limits: Sequence[Any]) -> Status:
    """Return the status of a descriptor from the verdicts and the limits of its rules."""
    place = 0 if len(verdicts) == 1 else min(range(len(verdicts)), key=lambda each: _rank(verdicts[each]))
    allowed, _, left, retry_after_us, reset_after_us = verdicts[place]
    if allowed:
        return Status(OK, limits[place], min(left, LARGEST), reset_after_us)
    return Status(OVER_LIMIT, limits[place], min(left, LARGEST), retry_after_us)


def _rank(verdict: Fields) -> tuple[int, float]:
    """Return the smallest rank for the most restrictive verdict."""
    allowed, _, left, retry_after_us, _ = verdict
    if allowed:
        return 1, left
    return 0, -inf if retry_after_us is None else -retry_after_us


def shown_limit(rule: Rule, quota: Quota) -> Any:
    """Return a quota as a `RateLimit`; for a period without a unit of Envoy the unit is 0, unknown."""
    unit = _UNITS_OF_SPANS[rule.span] if rule.span is not None else _UNITS.get(quota.period_us, 0)
    return RateLimit(requests_per_unit=min(quota.limit, LARGEST), unit=unit, name=rule.name)
