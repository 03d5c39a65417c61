"""Candidates: other limits for live rules, requested in the dashboard, that refuse nothing.

A candidate is a shadow rule beside a live rule. It exists until the server ends; the policy file is not changed. It decides
every request that the live rule decides, so its figures show what it would have refused, and what it would have admitted
instead of the live rule. The workers of a server share their candidates in a file.

A candidate starts with no counts, unlike its live rule. It warms up until units from before its start would no longer
count: its figures are too favourable, and start from 0 again at the end (see `warm_at`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from headgate import ConfigError, Rule
from headgate.algorithms import algorithm_for
from headgate.clock import MICROSECONDS, to_microseconds
from headgate.policy import AsyncLivePolicy
from headgate.quota import Quota
from headgate.rules import make_rule
from headgate_server.files import replace_file
from headgate_server.problems import ApiProblem

CANDIDATE = "candidate of "
"""Prefix of a candidate's name; the name of the live rule follows."""


class WatchedQuota(Struct, frozen=True):
    """A candidate's quota and its start, in seconds since the epoch."""

    quota: str
    since: float


WatchedRules = dict[str, dict[str, WatchedQuota]]
"""Candidates by limiter and live rule."""


class Candidates:
    """The candidates of a server.

    Args:
        live: The limiters.
        file: The file in which workers share their candidates; `None` for a single process.
        on_change: Called with all candidates after a change.
    """

    def __init__(
        self,
        live: AsyncLivePolicy,
        file: Path | None = None,
        on_change: Callable[[WatchedRules], None] = lambda _: None,
    ) -> None:
        self._live = live
        self._file = file
        self._on_change = on_change
        self._watched: WatchedRules = {}

    def set(self, limiter: str, rule: str, quota: str | None) -> None:
        """Set the candidate for a live rule; a quota of `None` removes it.

        Raises:
            ApiProblem: 404 if the rule does not exist.
            ConfigError: The quota is not valid for this kind of rule or its store.
        """
        watched = {name: dict(rules) for name, rules in self._watched.items()}
        if quota is None:
            watched.get(limiter, {}).pop(rule, None)
        else:
            candidate = candidate_for(self._rule(limiter, rule), quota)
            self._live[limiter].store.bind_async(limiter, (candidate,))
            watched.setdefault(limiter, {})[rule] = WatchedQuota(quota, time.time())
        if self._file is not None:
            replace_file(self._file, msgspec.json.encode(watched))
        self._use(watched)

    def refresh(self) -> None:
        """Use the candidates that another worker has set."""
        if self._file is None:
            return
        try:
            watched = msgspec.json.decode(self._file.read_bytes(), type=WatchedRules)
        except FileNotFoundError:
            return
        if watched != self._watched:
            self._use(watched)

    def _use(self, watched: WatchedRules) -> None:
        self._watched = watched
        self._live.watch_beside(self._rules_of)
        self._on_change(watched)

    def _rules_of(self, limiter: str, rules: tuple[Rule, ...]) -> dict[str, Rule]:
        """Return the candidates for the rules of a limiter, without candidates for rules that no longer exist."""
        watched = self._watched.get(limiter, {})
        return {
            rule.name: candidate_for(rule, watched[rule.name].quota) for rule in rules if rule.name in watched
        }

    def _rule(self, limiter: str, rule: str) -> Rule:
        found = self._live.policy.limiters.get(limiter)
        for each in found.rules if found is not None else ():
            if each.name == rule:
                return each
        raise ApiProblem(404, f"there is no rule {rule[:80]!r} in a limiter {limiter[:80]!r}")


def candidate_for(rule: Rule, quota: str) -> Rule:
    """Return a copy of a live rule with another quota and name; tiers do not change.

    Args:
        rule: The live rule.
        quota: A quota as in the policy file: for a `concurrent` rule a number, for a `calendar` rule one of the same span.

    Raises:
        ConfigError: The quota is not valid for this kind of rule.
    """
    if rule.kind == "penalty":
        raise ConfigError(f"rule {rule.name!r} is a penalty, which cannot be a shadow rule")
    if rule.kind == "concurrent":
        other = rule.quota_from(int(quota) if quota.isdecimal() else quota)
    else:  # another period is allowed, except for a calendar
        other = rule.quota_from(quota) if rule.kind == "calendar" else Quota.parse(quota)
    name = f"{CANDIDATE}{rule.name}"
    return make_rule(
        rule.kind,
        other,
        rule.scope,
        rule.tiers,
        name,
        rule.buckets,
        rule.strict,
        unit=rule.unit,
        span=rule.span,
        timezone=rule.timezone,
    )


def warm_at(candidate: Rule, since: float) -> float:
    """Return when a candidate that started at `since` has warmed up.

    A candidate has no units from before its start. It has warmed up when these would no longer count: after its period,
    at the end of the calendar's window, or when an empty bucket is full again.
    """
    now = to_microseconds(since)
    times = [now]
    for quota in (candidate.quota, *candidate.tiers.values()):
        algorithm = algorithm_for(candidate, quota)
        full, _ = algorithm.decide(None, now, algorithm.capacity, birth=1)
        if full is not None:
            times.append(algorithm.fresh_at(full))
    return max(times) / MICROSECONDS
