"""How much of a rule a key has used, as the server, its client, the command and the dashboard show it.

A decision says how much remains, which is 0 for every key beyond its limit. To learn how far beyond, ask the same rule with
a limit that no caller reaches. It has the same state, because the state of a rule does not depend on its limit.
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
    """What one rule has counted for a key; times in seconds.

    Attributes:
        name: The rule's name.
        limit: The most it admits at once.
        used: Units that count now, or places that are held; more than the limit if that was lowered, or units were recorded.
        remaining: Units left.
        reset_after: Until nothing is counted any more: of a calendar the end of its window, of places the end of the last
            lease. `None` if nothing is ever counted.
        frees_after: Until one more unit would be admitted; 0 is now, `None` is never.
        scope: Whose units are counted.
        kind: The kind of the rule.
        unit: What it counts.
        timezone: Of a calendar, its time zone.
        shadow: Whether the rule only watches.
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
    """Return how much of a rule is used.

    Args:
        rule: The rule.
        counted: Its answer to a cost of 0, asked of `with_unreachable_limits(rule)`, which also counts beyond the limit.
        one_more: Its answer to a cost of 1.
        shadow: Whether the rule only watches.
    """
    used = counted.limit - counted.remaining
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
    """Return the rule with the same state and limits that no caller reaches."""
    quotas = (rule.quota, *rule.tiers.values())
    algorithms = (algorithm_for(rule, quota) for quota in quotas)
    # The largest burst that every tier can count exactly.
    most = MAX_UNITS // max(a.d if isinstance(a, TokenBucket) else 1 for a in algorithms)
    tiers = {tier: _highest(rule, quota, most) for tier, quota in rule.tiers.items()}
    return replace(rule, quota=_highest(rule, rule.quota, most), tiers=MappingProxyType(tiers))


def _highest(rule: Rule, quota: Quota, most: int) -> Quota:
    if rule.kind != "token_bucket":
        return Quota(most, quota.period_us)
    # The bucket must drain as before, so only its burst grows. A bucket with the limit 0 stays empty.
    return Quota(quota.limit, quota.period_us, most) if quota.limit else quota
