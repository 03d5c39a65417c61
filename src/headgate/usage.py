"""Usage of a rule by a key, for the server, its client, the command line and the dashboard.

A decision contains the remaining units, which are 0 for every key at or above its limit. The exact usage comes from a check
of the same rule with an unreachable limit: it has the same state, because the limit is not part of a state's identity.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

from headgate.algorithms import TokenBucket, algorithm_for
from headgate.decision import RuleResult
from headgate.quota import MAX_UNITS, Quota
from headgate.rules import REQUESTS, Kind, Rule

__all__ = ["RuleUsage", "usage_of", "with_unreachable_limits"]


@dataclass(frozen=True, slots=True)
class RuleUsage:
    """The usage of one rule by a key; times in seconds.

    Attributes:
        name: The rule's name.
        limit: The highest number of units at once.
        used: Counted units, held places, or the refusals that a penalty counts; above the limit if it was lowered, or if
            units were recorded.
        remaining: Units left.
        reset_after: Time until the count is 0: for a calendar the end of its window, for places the end of the last lease.
            `None` if the rule never counts anything.
        frees_after: Time until one more unit would be admitted; 0 is now, `None` is never.
        scope: The scope of the rule.
        kind: The kind of the rule.
        unit: The unit of the rule.
        timezone: The time zone of a calendar rule.
        shadow: Whether it is a shadow rule, which never refuses.
    """

    name: str
    limit: int
    used: int
    remaining: int
    reset_after: float | None
    frees_after: float | None
    scope: str | None
    kind: Kind = "sliding_window"
    unit: str = REQUESTS
    timezone: str | None = None
    shadow: bool = False


def usage_of(rule: Rule, counted: RuleResult, one_more: RuleResult, *, shadow: bool = False) -> RuleUsage:
    """Return the usage of a rule.

    Args:
        rule: The rule.
        counted: The result of a check with cost 0 by `with_unreachable_limits(rule)`.
        one_more: The result of a check with cost 1.
        shadow: Whether it is a shadow rule.
    """
    used = counted.limit - counted.remaining
    if rule.kind == "penalty":  # while it refuses, nothing remains
        used = min(used, one_more.limit)
    return RuleUsage(
        name=rule.name,
        limit=one_more.limit,
        used=used,
        remaining=max(0, one_more.limit - used),
        reset_after=counted.reset_after,
        frees_after=0.0 if one_more.allowed else one_more.retry_after,
        scope=rule.scope,
        kind=rule.kind,
        unit=rule.unit,
        timezone=rule.timezone,
        shadow=shadow,
    )


def with_unreachable_limits(rule: Rule) -> Rule:
    """Return a rule with the same state and limits that no caller reaches."""
    quotas = (rule.quota, *rule.tiers.values())
    algorithms = (algorithm_for(rule, quota) for quota in quotas)
    # The largest burst that every tier can count exactly.
    most = MAX_UNITS // max(a.d if isinstance(a, TokenBucket) else 1 for a in algorithms)
    tiers = {tier: _highest(rule, quota, most) for tier, quota in rule.tiers.items()}
    return replace(rule, quota=_highest(rule, rule.quota, most), tiers=MappingProxyType(tiers))


def _highest(rule: Rule, quota: Quota, most: int) -> Quota:
    if rule.kind != "token_bucket":
        return Quota(most, quota.period_us)
    # The rate must not change, so only the burst grows. A bucket with the limit 0 stays empty.
    return Quota(quota.limit, quota.period_us, most) if quota.limit else quota
