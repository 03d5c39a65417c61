"""Limiters and stores in the form of the API."""

from __future__ import annotations

import json
import re
from typing import Any

from headgate import AsyncLimiter, Rule
from headgate.clock import MICROSECONDS
from headgate.observe import redact
from headgate.outage import policy_to_data
from headgate.policy import LimiterPolicy, in_words
from headgate.quota import format_period
from headgate.rules import DEFAULT_BUCKETS, REQUESTS
from headgate_server.wire import LimiterShown, RuleShown, StoreShown


def limiter_shown(policy: LimiterPolicy) -> LimiterShown:
    """Return a limiter without credentials, and without the tiers of single keys."""
    return LimiterShown(
        name=policy.name,
        rules=[rule_shown(rule, policy.rule_sources.get(rule.name)) for rule in policy.rules],
        shadow=[
            rule_shown(rule, policy.rule_sources.get(rule.name), is_shadow=True) for rule in policy.shadow
        ],
        store=redact(policy.store),
        on_store_error=policy_to_data(policy.on_store_error),
        default_tier=policy.default_tier,
        headers=policy.headers,
        source=policy.source,
    )


def rule_shown(rule: Rule, source: str | None = None, *, is_shadow: bool = False) -> RuleShown:
    """Return a rule in the form of the API."""
    return RuleShown(
        name=rule.name,
        kind=rule.kind,
        quota=rule.data_of(rule.quota),
        limit=rule.quota.limit,
        period=rule.quota.period_us / MICROSECONDS,
        burst=rule.quota.burst,
        scope=rule.scope,
        tiers=_tiers(rule),
        strict=rule.strict,
        buckets=rule.buckets,
        words=in_words(rule),
        unit=rule.unit,
        lease=rule.quota.period_us / MICROSECONDS if rule.kind == "concurrent" else None,
        timezone=rule.timezone,
        growth=rule.growth if rule.kind == "penalty" else None,
        longest=rule.longest_us / MICROSECONDS if rule.kind == "penalty" else None,
        toml=rule_toml(rule, is_shadow=is_shadow),
        source=source,
    )


def rule_toml(rule: Rule, *, is_shadow: bool = False) -> str:
    """Return a rule as TOML for the policy file, without default values."""
    usual_kind = "sliding_window" if rule.quota.burst is None else "token_bucket"
    is_window = rule.kind == "sliding_window"
    entries: dict[str, Any] = {
        "quota": rule.data_of(rule.quota),
        "name": rule.name,
        "kind": None if rule.kind == usual_kind else rule.kind,
        "scope": rule.scope,
        "tiers": _tiers(rule) or None,
        "unit": None if rule.unit == REQUESTS else rule.unit,
        "buckets": rule.buckets if is_window and rule.buckets != DEFAULT_BUCKETS else None,
        "strict": False if is_window and not rule.strict else None,
        "lease": format_period(rule.quota.period_us) if rule.kind == "concurrent" else None,
        "timezone": rule.timezone,
        "growth": rule.growth if rule.growth > 1 else None,
        "longest": format_period(rule.longest_us) if rule.growth > 1 else None,
        "shadow": is_shadow or None,
    }
    return toml_value({name: value for name, value in entries.items() if value is not None})


def toml_value(value: Any) -> str:
    """Return a value as TOML; strings, numbers and booleans are written as in JSON."""
    if isinstance(value, dict):
        entries = ", ".join(f"{toml_key(name)} = {toml_value(each)}" for name, each in value.items())
        return f"{{ {entries} }}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_key(name: str) -> str:
    """Return a key for TOML, in quotes if necessary."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)


def _tiers(rule: Rule) -> dict[str, str | int]:
    """Return the quotas of a rule's tiers."""
    return {tier: rule.data_of(quota) for tier, quota in rule.tiers.items()}


def store_shown(limiter: AsyncLimiter, policy: LimiterPolicy, reason: str | None = None) -> StoreShown:
    """Return the state of a limiter's store; `reason` is the error of a ping, if it failed."""
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
