"""What a policy means, in plain words."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from headgate.observe.redaction import redact
from headgate.outage.policies import Local, OnStoreError
from headgate.policy.model import OVERRIDE, LimiterPolicy, Policy, ServerPolicy
from headgate.quota import Quota, format_period
from headgate.rules import REQUESTS, SHARED, Rule

_UNITS = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_NOTES = {
    "fixed_window": "in windows by the clock, so up to twice as many around an edge",
    "sliding_log": "exact to the microsecond",
}


def explain(policy: Policy) -> str:
    """Return the policy in plain words, a paragraph per limiter, and one for the server if there is something to say."""
    paragraphs = [list(_limiter(limiter)) for limiter in policy.limiters.values()]
    if policy.server != ServerPolicy():
        paragraphs.append(list(_server(policy.server)))
    return "\n\n".join(map("\n".join, paragraphs))


def in_words(rule: Rule) -> str:
    """Return what a rule allows to whom in plain words: `at most 5 in any minute for each key`."""
    return f"{_quota(rule, rule.quota)} {_whose(rule.scope)}"


def _limiter(limiter: LimiterPolicy) -> Iterator[str]:
    yield f"{limiter.name}: counted in {redact(limiter.store)}"
    for rule in limiter.rules:
        yield f"  - {_rule(rule)}"
    if len(limiter.rules) > 1:
        yield "  All of these are decided together: either every one is charged, or none."
    if not limiter.rules:
        yield "  Nothing is refused."
    for rule in limiter.shadow:
        yield f"  - only watched, refuses nothing: {_rule(rule)}"
    if limiter.default_tier is not None:
        yield f"  Callers without a known tier count as {limiter.default_tier!r}."
    for key, tier in limiter.overrides.items():
        rules = [rule for rule in (*limiter.rules, *limiter.shadow) if tier in rule.tiers]
        quotas = ", ".join(f"{_quota(rule, rule.tiers[tier])} ({rule.name})" for rule in rules)
        yield f"  {_key(key)} has its own: {quotas or 'nothing so far'}."
    yield f"  If the store cannot be asked: {_failure(limiter.on_store_error)}."


def _server(server: ServerPolicy) -> Iterator[str]:
    host = f"[{server.host}]" if ":" in server.host else server.host
    yield f"server: listens on {host}:{server.port}, takes bodies of up to {server.largest_body:,} bytes"
    for name, token in server.tokens.items():
        until = (
            ""
            if token.expires is None
            else f" until {datetime.fromtimestamp(token.expires, UTC):%Y-%m-%d %H:%M} UTC"
        )
        yield f"  - the token {name!r} may {' and '.join(sorted(token.may, reverse=True))}{until}"
    if not server.tokens and server.is_private:
        yield "  Without tokens: open to clients on this machine, closed to all others."
    elif not server.tokens:
        yield "  Without tokens: other machines could reach this address, so it does not start."
    if server.top_keys:
        yield f"  The dashboard shows the {server.top_keys:,} most refused keys, in plain text."
    if server.record is not None:
        keys = "keys" if server.record_keys == "plain" else "digests of keys"
        yield f"  Decisions are recorded to {server.record} with {keys}, up to {server.record_bytes:,} bytes."


def _rule(rule: Rule) -> str:
    tiers = "".join(
        f"; tier {tier!r}: {_quota(rule, quota)}"
        for tier, quota in rule.tiers.items()
        if not tier.startswith(OVERRIDE)
    )
    note = _NOTES.get(rule.kind, "")
    if rule.kind == "concurrent":
        note = f"a place that is not renewed is free again after {format_period(rule.quota.period_us)}"
    note = f" ({note})" if note else ""
    return f"{in_words(rule)}{note}{tiers}  [{rule.name}]"


def _quota(rule: Rule, quota: Quota) -> str:
    if not quota.limit:
        return "nothing at all"
    period = _period(quota.period_us)
    units = f"{quota.limit:,}" if rule.unit == REQUESTS else f"{quota.limit:,} {rule.unit}"
    match rule.kind:
        case "token_bucket":
            burst = quota.limit if quota.burst is None else quota.burst
            return f"a steady {units} per {period}, up to {burst:,} at once"
        case "fixed_window":
            return f"{units} per {period}"
        case "concurrent":
            return f"at most {units} held at once"
        case "calendar":
            return f"at most {units} in a calendar {rule.span} of {rule.timezone}"
    return f"at most {units} in any {period}"


def _period(period_us: int) -> str:
    text = format_period(period_us, long=True)
    if text.isalpha():
        return text
    number = text.rstrip("smhdw")
    return f"{number} {_UNITS[text[len(number) :]]}"


def _whose(scope: str | None) -> str:
    if scope is None:
        return "for each key"
    return "for everybody together" if scope == SHARED else f"for each {scope}"


def _key(key: object) -> str:
    return repr(dict(sorted(key))) if isinstance(key, frozenset) else repr(key)


def _failure(on_store_error: OnStoreError) -> str:
    if isinstance(on_store_error, Local):
        return f"each process admits {on_store_error.share * 100:g}% of every limit by itself"
    return "everything is admitted" if on_store_error == "open" else "everything is refused"
