"""The rules of a limiter that decide a request: those whose scopes its descriptors have.

Each combination of scopes is a limiter with a part of the rules. The counts do not depend on the combination, because a
state belongs to the limiter's name, the rule and the key.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from headgate import Rule
from headgate.http import Writer
from headgate.policy import AsyncVersion
from headgate.quota import Quota
from headgate.rules import make_rule
from headgate.stores import Operation, Request
from headgate_server.envoy.answers import shown_limit
from headgate_server.envoy.matching import Asked

Terms = str | tuple[Quota | None, ...] | None
"""The tier of a request, or the quota of each rule."""

MAX_PARTS = 1_024
"""Cached combinations of a limiter; Envoy's configuration has few."""

DEADLINES_MS = (5, 10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500, 750, 1_000, 2_000, 5_000)
"""Deadlines of calls are rounded down to one of these, so that few limiters are bound."""

MARGIN_MS = 2
"""Milliseconds of a call's deadline that are left for the answer."""


def rounded_deadline(remaining: float | None) -> float | None:
    """Return the seconds that the store may take, from the remaining seconds of the call; `None` without a limit."""
    if remaining is None:
        return None
    left_ms = remaining * 1_000 - MARGIN_MS
    if left_ms > DEADLINES_MS[-1]:
        return None
    return DEADLINES_MS[max(1, bisect_right(DEADLINES_MS, left_ms)) - 1] / 1_000


class LimiterPart:
    """A part of a limiter's rules.

    Args:
        version: The limiter.
        asked: The counters, one for each scope; only the period of an override matters.
        deadline: Seconds that the store may take.

    Attributes:
        limiter: The limiter with these rules.
        writer: Writes header fields.
        places: For each counter, the places of its rules.
    """

    def __init__(self, version: AsyncVersion, asked: Sequence[Asked], deadline: float | None) -> None:
        live = tuple(rule for each in asked for rule in _rules_for(version, each))
        scopes = {each.scope for each in asked if each.override is None}
        shadow = tuple(rule for rule in version.policy.shadow if rule.scope in scopes)
        self.limiter = version.part(live, shadow, deadline=deadline)
        self.writer = Writer(live, version.policy.headers)
        self.places = [
            [place for place, rule in enumerate(live) if rule.scope == each.scope] for each in asked
        ]
        self._asked = [next(i for i, each in enumerate(asked) if each.scope == rule.scope) for rule in live]
        """The place of each rule's counter."""
        self._has_overrides = any(each.override is not None for each in asked)
        self._limits = [shown_limit(rule, rule.quota) for rule in live]

    def request(self, asked: Sequence[Asked], operation: Operation = "hit") -> Request:
        """Return the request for these counters; a `"peek"` requests at least one unit of each."""
        costs = [asked[place].cost for place in self._asked] or [each.cost for each in asked]
        if operation == "peek":
            costs = [cost or 1 for cost in costs]
        cost = costs[0] if len(set(costs)) == 1 else tuple(costs)
        key = {each.scope: each.key for each in asked}
        request = Request(operation, key, cost)
        if not self._has_overrides:
            return request
        return request.with_quotas(
            tuple(
                asked[place].override if rule.is_rate else None
                for place, rule in zip(self._asked, self.limiter.rules, strict=True)
            )
        )

    def terms(self, request: Request) -> Terms:
        """Return the quotas that apply to a request, or its tier."""
        if self.limiter.terms_for is None:
            return request.quotas
        tier, quotas = self.limiter.terms_for(request.key, None, request.quotas)
        return tier if quotas is None else quotas

    def limits(self, terms: Terms) -> Sequence[Any]:
        """Return the limits of all rules as in an answer."""
        if terms is None:
            return self._limits
        rules = self.limiter.rules
        if not isinstance(terms, tuple):
            return [shown_limit(rule, rule.quota_for(terms)) for rule in rules]
        return [shown_limit(rule, own or rule.quota) for rule, own in zip(rules, terms, strict=True)]


class LimiterParts:
    """The parts of a limiter that have been used.

    Attributes:
        version: The limiter.
    """

    def __init__(self, version: AsyncVersion) -> None:
        self.version = version
        self._parts: dict[object, LimiterPart] = {}
        self.live_scopes = frozenset(rule.scope for rule in version.rules)
        """Scopes with live rules; the others have only shadow rules."""

    def get(self, asked: Sequence[Asked], deadline: float | None) -> LimiterPart:
        """Return the part that decides these counters, which have different scopes."""
        shape = tuple([(each.scope, each.override and each.override.period_us) for each in asked])
        found = self._parts.get((shape, deadline))
        if found is None:
            if len(self._parts) >= MAX_PARTS:
                self._parts.clear()
            found = self._parts[shape, deadline] = LimiterPart(self.version, asked, deadline)
        return found


def _rules_for(version: AsyncVersion, asked: Asked) -> list[Rule]:
    """Return the live rules that decide a counter.

    A quota of the call replaces all of them, except penalties: it applies to the rule with its period, or to a new rule.
    """
    own = [rule for rule in version.rules if rule.scope == asked.scope]
    override = asked.override
    if override is None or not own:
        return own
    penalties = [rule for rule in own if rule.kind == "penalty"]
    rates = [rule for rule in own if rule.kind != "penalty"]
    same = [rule for rule in rates if rule.quota.period_us == override.period_us and rule.kind != "calendar"]
    if same:
        return [same[0], *penalties]
    if rates[0].kind == "fixed_window":
        return [make_rule("fixed_window", override, asked.scope), *penalties]
    return [make_rule("sliding_window", override, asked.scope), *penalties]
