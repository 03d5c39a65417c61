"""How much was counted for a key, also beyond the limit.

A decision says how much remains, which is 0 for all who are beyond the limit. How far beyond is asked of the same rule with
limits out of reach. That is the same state, for what a rule counts in does not depend on its limit.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from headgate.algorithms import algorithm_for
from headgate.algorithms.token_bucket import TokenBucket
from headgate.quota import MAX_UNITS, Quota
from headgate.rules import Rule


def out_of_reach(rule: Rule) -> Rule:
    """Return the rule with the same state and limits that no caller reaches."""
    quotas = (rule.quota, *rule.tiers.values())
    algorithms = (algorithm_for(rule, quota) for quota in quotas)
    # The largest burst that can be counted in the small parts of every tier.
    most = MAX_UNITS // max(a.d if isinstance(a, TokenBucket) else 1 for a in algorithms)
    tiers = {tier: _highest(rule, quota, most) for tier, quota in rule.tiers.items()}
    return replace(rule, quota=_highest(rule, rule.quota, most), tiers=MappingProxyType(tiers))


def _highest(rule: Rule, quota: Quota, most: int) -> Quota:
    if rule.kind != "token_bucket":
        return Quota(most, quota.period_us)
    # It must drain as before, so only what it holds may grow; if it never drains it holds nothing.
    return Quota(quota.limit, quota.period_us, most) if quota.limit else quota
