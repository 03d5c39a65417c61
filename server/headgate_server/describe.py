"""Limiters and stores as the API shows them."""

from __future__ import annotations

from headgate import AsyncLimiter
from headgate.clock import MICROSECONDS
from headgate.observe import redact
from headgate.policy import in_words
from headgate.policy.model import OVERRIDE, LimiterPolicy
from headgate.quota import Quota
from headgate.rules import Rule
from headgate.stores.failure import Local
from headgate_server.wire import LimiterShown, LocalPolicy, RuleShown, StoreShown


def limiter_shown(policy: LimiterPolicy) -> LimiterShown:
    """Return a limiter without credentials, and without the tiers that stand for single keys."""
    failure = policy.on_store_error
    return LimiterShown(
        name=policy.name,
        rules=[rule_shown(rule) for rule in policy.rules],
        shadow=[rule_shown(rule) for rule in policy.shadow],
        store=redact(policy.store),
        on_store_error=LocalPolicy(failure.share) if isinstance(failure, Local) else failure,
        default_tier=policy.default_tier,
        headers=policy.headers,
    )


def rule_shown(rule: Rule) -> RuleShown:
    """Return a rule."""
    return RuleShown(
        name=rule.name,
        kind=rule.kind,
        quota=_quota(rule, rule.quota),
        limit=rule.quota.limit,
        period=rule.quota.period_us / MICROSECONDS,
        burst=rule.quota.burst,
        scope=rule.scope,
        tiers={
            tier: _quota(rule, quota) for tier, quota in rule.tiers.items() if not tier.startswith(OVERRIDE)
        },
        strict=rule.strict,
        buckets=rule.buckets,
        words=in_words(rule),
        unit=rule.unit,
        lease=rule.quota.period_us / MICROSECONDS if rule.kind == "concurrent" else None,
        timezone=rule.timezone,
    )


def _quota(rule: Rule, quota: Quota) -> str | int:
    return quota.limit if rule.kind == "concurrent" else rule.text_of(quota)


def store_shown(limiter: AsyncLimiter, policy: LimiterPolicy, reason: str | None = None) -> StoreShown:
    """Return how a limiter's store is doing; a reason is what a ping has just said against it."""
    health = limiter.health
    reason = reason or health.reason
    return StoreShown(
        limiter=policy.name,
        store=redact(policy.store),
        up=reason is None,
        breaker="open" if health.state == "unavailable" else "closed",
        failures=health.failures,
        reason=None if reason is None else redact(reason),
    )
