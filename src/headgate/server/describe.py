"""Limiters and stores as the API shows them."""

from __future__ import annotations

from headgate import AsyncLimiter
from headgate.clock import MICROSECONDS
from headgate.observe import redact
from headgate.policy import in_words
from headgate.policy.model import OVERRIDE, LimiterPolicy
from headgate.rules import Rule
from headgate.server.wire import LimiterShown, RuleShown, StoreShown


def limiter_shown(policy: LimiterPolicy) -> LimiterShown:
    """Return a limiter without credentials, and without the tiers that stand for single keys."""
    return LimiterShown(
        name=policy.name,
        rules=[rule_shown(rule) for rule in policy.rules],
        shadow=[rule_shown(rule) for rule in policy.shadow],
        store=redact(policy.store),
        on_store_error=_failure_policy(policy.on_store_error),
        default_tier=policy.default_tier,
        headers=policy.headers,
    )


def rule_shown(rule: Rule) -> RuleShown:
    """Return a rule."""
    return RuleShown(
        name=rule.name,
        kind=rule.kind,
        quota=str(rule.quota),
        limit=rule.quota.limit,
        period=rule.quota.period_us / MICROSECONDS,
        burst=rule.quota.burst,
        scope=rule.scope,
        tiers={tier: str(quota) for tier, quota in rule.tiers.items() if not tier.startswith(OVERRIDE)},
        strict=rule.strict,
        buckets=rule.buckets,
        words=in_words(rule),
    )


def store_shown(limiter: AsyncLimiter, policy: LimiterPolicy) -> StoreShown:
    """Return how a limiter's store is doing."""
    is_up, reason = limiter.health.available, limiter.health.reason
    return StoreShown(
        limiter=policy.name,
        store=redact(policy.store),
        up=is_up,
        breaker="closed" if is_up else "open",
        failures=limiter.health.failures,
        error=None if reason is None else redact(reason),
    )


def _failure_policy(on_store_error: str | float) -> str:
    return on_store_error if isinstance(on_store_error, str) else f"local {on_store_error * 100:g}%"
