"""Pure functions that decide: from a rule, a state and a time to the new state and a verdict."""

from __future__ import annotations

from math import gcd

from headgate.algorithms.base import Algorithm, Receipt, State
from headgate.algorithms.concurrent import Concurrent
from headgate.algorithms.joint import decide_all
from headgate.algorithms.penalty import Penalty, limit_of
from headgate.algorithms.sliding_window import MAX_ENTRIES, SlidingWindow
from headgate.algorithms.token_bucket import TokenBucket
from headgate.algorithms.windows import Calendar, FixedWindow
from headgate.errors import ConfigError
from headgate.quota import MAX_UNITS, MILLISECOND, Quota
from headgate.rules import Rule

__all__ = [
    "MAX_ENTRIES",
    "Algorithm",
    "Calendar",
    "Concurrent",
    "FixedWindow",
    "Penalty",
    "Receipt",
    "SlidingWindow",
    "State",
    "TokenBucket",
    "algorithm_for",
    "capacity_of",
    "decide_all",
    "limit_of",
]

_HOUR_US = 3_600_000_000
_LATEST = 2**62  # microseconds: stores keep 64 bits


def algorithm_for(rule: Rule, quota: Quota | None = None) -> Algorithm:
    """Return the algorithm of a rule, for its default quota or the given one.

    Raises:
        ConfigError: The rule cannot count this quota exactly.
    """
    quota = rule.quota if quota is None else quota
    if rule.kind == "fixed_window":
        return FixedWindow(rule.name, quota.limit, quota.period_us)
    if rule.kind == "sliding_window":
        width = -(quota.period_us // -rule.buckets)
        lifetime = quota.period_us + rule.lease_us + (width if rule.strict else 0)
        return SlidingWindow(rule.name, quota.limit, width, lifetime)
    if rule.kind == "sliding_log":
        return SlidingWindow(rule.name, quota.limit, 1, quota.period_us + rule.lease_us)
    if rule.kind == "concurrent":
        return Concurrent(rule.name, quota.limit, quota.period_us)
    if rule.kind == "penalty":
        return Penalty(rule.name, quota.limit, quota.period_us, rule.growth, rule.longest_us)
    if rule.span is not None and rule.timezone is not None:
        return Calendar(rule.name, quota.limit, rule.span, rule.timezone)
    return _token_bucket(rule, quota)


def capacity_of(rule: Rule, quota: Quota) -> int:
    """Return the highest number of units that a rule admits at once with a quota."""
    if rule.lease_us and rule.kind == "token_bucket":
        return _burst_between_leases(rule, quota)
    return _burst(quota)


def is_state(algorithm: Algorithm, numbers: State) -> bool:
    """Return whether numbers are a valid state of this algorithm; stored data may come from another program."""
    size = len(numbers)
    if isinstance(algorithm, TokenBucket):
        has_size = size == 7 and min(numbers[4:]) > 0
    elif isinstance(algorithm, SlidingWindow):
        has_size = size >= 3 and size % 2 == 1
    elif isinstance(algorithm, Concurrent):
        has_size = size >= 5 and size % 3 == 2
    elif isinstance(algorithm, Penalty):
        has_size = size == 5
    else:
        has_size = size == 3
    return (
        has_size and min(numbers) >= 0 and max(numbers) <= MAX_UNITS and algorithm.fresh_at(numbers) < _LATEST
    )


def _token_bucket(rule: Rule, quota: Quota) -> TokenBucket:
    tick = 1 if quota.period_us <= _HOUR_US else MILLISECOND
    ticks = quota.period_us // tick
    common = gcd(quota.limit, ticks)
    n, d = quota.limit // common, ticks // common
    # The level of one tier must be countable in the small parts of every other. If it were reduced, callers could lower
    # their level by changing between tiers.
    most = max(map(_burst, (quota, rule.quota, *rule.tiers.values())))
    if most * d > MAX_UNITS:
        raise ConfigError(
            f"{str(quota)!r} cannot be counted exactly as a token bucket: burst {most} x {d} exceeds 2^53; "
            f"use a rounder limit, a smaller burst (in every tier) or a sliding_window"
        )
    return TokenBucket(rule.name, _burst_between_leases(rule, quota), n, d, tick)


def _burst_between_leases(rule: Rule, quota: Quota) -> int:
    """Return the burst without the units that the rate adds during a lease."""
    burst = _burst(quota)
    added = -(quota.limit * rule.lease_us // -quota.period_us)
    if 2 * added > burst:
        raise ConfigError(
            f"rule {rule.name!r}: a lease holds back the {added} units that {str(quota)!r} adds during it, over half of "
            f"the burst {burst}; use a shorter lease or a larger burst"
        )
    return burst - added


def _burst(quota: Quota) -> int:
    return quota.limit if quota.burst is None else quota.burst
