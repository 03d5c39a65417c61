"""Descriptions of a policy: its meaning, warnings, and the changes between two versions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches

from headgate.observe.redaction import redact
from headgate.outage.policies import Local, OnStoreError
from headgate.policy.environment import PREFIX, variables_of
from headgate.policy.model import LimiterPolicy, Policy, ServerPolicy, tiers_of
from headgate.policy.proxies import EnvoyPolicy, GatePolicy
from headgate.quota import Quota, format_period, period_in_words
from headgate.rules import REQUESTS, SHARED, Rule

_NOTES = {
    "fixed_window": "in fixed windows, so up to twice as many around the end of a window",
    "sliding_log": "exact to the microsecond",
}

_READ_AT_START = frozenset({"host", "port", "record", "record_bytes", "record_keys", "history"})
"""Settings of the server that need a restart."""

_OTHER_VARIABLES = frozenset({"HEADGATE_TOKEN", "HEADGATE_PURE"})
_TEST_VARIABLES = "HEADGATE_TEST_"


def explain(policy: Policy) -> str:
    """Return a description of the policy: a paragraph per limiter, and one for each kind of proxy."""
    paragraphs = [list(_limiter(limiter)) for limiter in policy.limiters.values()]
    if policy.envoy is not None:
        paragraphs.append(list(_envoy(policy.envoy)))
    if policy.gate.limiters:
        paragraphs.append(list(_gate(policy.gate)))
    return "\n\n".join(map("\n".join, paragraphs))


def in_words(rule: Rule) -> str:
    """Return a description of a rule: `at most 5 in any minute for each key`."""
    return f"{_quota(rule, rule.quota)} {_whose(rule.scope)}"


def _limiter(limiter: LimiterPolicy) -> Iterator[str]:
    yield f"{limiter.name}: counted in {redact(limiter.store)}"
    for rule in limiter.rules:
        yield f"  - {_rule(rule)}"
    if len(limiter.rules) > 1:
        yield "  These rules are decided together: all are charged, or none."
    if not limiter.rules:
        yield "  Nothing is refused."
    for rule in limiter.shadow:
        yield f"  - shadow rule, refuses nothing: {_rule(rule)}"
    if limiter.default_tier is not None:
        yield f"  Callers without a known tier have the tier {limiter.default_tier!r}."
    rules = {rule.name: rule for rule in (*limiter.rules, *limiter.shadow)}
    for key, own in limiter.overrides.items():
        quotas = ", ".join(f"{_quota(rules[name], quota)} ({name})" for name, quota in own.items())
        yield f"  Override for {_key(key)}: {quotas or 'none'}."
    yield f"  If the store is down: {_failure(limiter.on_store_error)}."


def _envoy(envoy: EnvoyPolicy) -> Iterator[str]:
    host = f"[{envoy.host}]" if ":" in envoy.host else envoy.host
    yield f"envoy: the rate-limit service listens on {host}:{envoy.port}"
    for name, domain in envoy.domains.items():
        together = "together" if domain.atomic else "independently"
        yield f"  - domain {name!r}: limiter {domain.limiter}, descriptors are decided {together}"


def _gate(gate: GatePolicy) -> Iterator[str]:
    yield f"gate: trusts X-Forwarded-For from {', '.join(gate.proxies) or 'nobody'}"
    for name, sources in gate.limiters.items():
        parts = [f"{scope} = {source}" if scope else str(source) for scope, source in sources.items()]
        yield f"  - /v1/gate/{name} counts by {', '.join(parts)}"


def _rule(rule: Rule) -> str:
    tiers = "".join(f"; tier {tier!r}: {_quota(rule, quota)}" for tier, quota in rule.tiers.items())
    note = _NOTES.get(rule.kind, "")
    if rule.kind == "concurrent":
        note = f"a place that is not renewed is freed after {format_period(rule.quota.period_us)}"
    elif rule.kind == "penalty" and rule.growth > 1:
        note = f"the next one is {rule.growth} times as long, up to {format_period(rule.longest_us)}"
    note = f" ({note})" if note else ""
    return f"{in_words(rule)}{note}{tiers}  [{rule.name}]"


def _quota(rule: Rule, quota: Quota) -> str:
    period = period_in_words(quota.period_us).replace("-", " ")
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
        case "penalty":
            refusals = "1 refusal" if quota.limit == 1 else f"{units} refusals within that time"
            return f"nothing for {format_period(quota.period_us)} after {refusals}"
    return f"at most {units} in any {period}"


def _whose(scope: str | None) -> str:
    if scope is None:
        return "for each key"
    return "for everybody together" if scope == SHARED else f"for each {scope}"


def _key(key: object) -> str:
    return repr(dict(sorted(key))) if isinstance(key, frozenset) else repr(key)


def _failure(on_store_error: OnStoreError) -> str:
    if isinstance(on_store_error, Local):
        return f"each process admits {on_store_error.share * 100:g}% of every limit"
    return "everything is admitted" if on_store_error == "open" else "everything is refused"


# Warnings


def find_warnings(policy: Policy, text: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each valid setting that is probably a mistake.

    Args:
        policy: The policy.
        text: The text of its file.
        environment: Variables that may replace single values.
    """
    for limiter in policy.limiters.values():
        yield from _limiter_warnings(limiter)
    if not policy.server.tokens and not policy.server.is_private:
        yield (
            f"[server] host = {policy.server.host!r} can be reached from other machines and there are no tokens, so the "
            "server will not start; `headgate token` makes one"
        )
    for name, token in policy.server.tokens.items():
        if token.expires is not None and token.expires <= time.time():
            yield f"the token {name!r} has expired; remove it, or create another one with `headgate token`"
    known = sorted(variables_of(text))
    for variable in sorted(environment):
        if not variable.startswith(PREFIX) or variable.startswith(_TEST_VARIABLES):
            continue
        if variable not in known and variable not in _OTHER_VARIABLES:
            near = get_close_matches(variable, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield f"environment variable {variable} sets nothing{hint}"


def _limiter_warnings(limiter: LimiterPolicy) -> Iterator[str]:
    if not limiter.rules:
        only = " but shadow rules" if limiter.shadow else ""
        yield f"limiter {limiter.name!r} has no rules{only}, so it admits everything"
    tiers = tiers_of((*limiter.rules, *limiter.shadow))
    if limiter.default_tier is not None and limiter.default_tier not in tiers:
        there = f"there is {', '.join(sorted(map(repr, tiers)))}" if tiers else "there are none"
        yield f"limiter {limiter.name!r}: no rule has the default_tier {limiter.default_tier!r}; {there}"


# Changes


def describe_changes(old: Policy, new: Policy) -> list[str]:
    """Return the names of the changes: limiters, and settings of the server and the proxies."""
    found = [
        f"{name} changed" if name in old.limiters else f"{name} is new"
        for name, limiter in new.limiters.items()
        if limiter != old.limiters.get(name)
    ]
    found += [f"{name} is gone" for name in old.limiters.keys() - new.limiters.keys()]
    names = [field.name for field in fields(ServerPolicy)]
    changed = [name for name in names if getattr(old.server, name) != getattr(new.server, name)]
    if changed:
        later = [f"{name} (after a restart)" if name in _READ_AT_START else name for name in changed]
        found.append(f"server: {', '.join(later)}")
    if (old.envoy and (old.envoy.host, old.envoy.port)) != (new.envoy and (new.envoy.host, new.envoy.port)):
        found.append("envoy: address (after a restart)")
    if (old.envoy and old.envoy.domains) != (new.envoy and new.envoy.domains):
        found.append("envoy: domains")
    if old.gate != new.gate:
        found.append("gate")
    return found
