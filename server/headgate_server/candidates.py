"""Candidates: other limits for live rules, asked for in the dashboard, that only watch.

A candidate is a shadow rule beside the live one. It refuses nothing, and is gone with the server: what is in force is what
the file says. It is asked about what the live one is asked about, also where that one refuses, and so says what it would
have refused and what it would have admitted instead. Workers of one server share theirs in a file.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from headgate import Rule
from headgate.policy import AsyncLivePolicy
from headgate.quota import Quota
from headgate.rules import make_rule
from headgate_server.files import replace_file
from headgate_server.problems import ApiProblem

CANDIDATE = "candidate of "
"""What the name of a candidate begins with; the name of the live rule follows."""

Quotas = dict[str, dict[str, str]]
"""By limiter and live rule."""


class Candidates:
    """The candidates of a server.

    Args:
        live: The limiters.
        file: Where workers share their candidates; `None` if there is just this process.
    """

    def __init__(self, live: AsyncLivePolicy, file: Path | None = None) -> None:
        self._live = live
        self._file = file
        self._quotas: Quotas = {}

    def set(self, limiter: str, rule: str, quota: str | None) -> None:
        """Watch what a live rule would do with another quota; with `None`, no longer.

        Raises:
            ApiProblem: 404 if there is no such rule.
            ConfigError: That is no quota, or none for this kind of rule.
        """
        quotas = {name: dict(rules) for name, rules in self._quotas.items()}
        if quota is None:
            quotas.get(limiter, {}).pop(rule, None)
        else:
            candidate_for(self._rule(limiter, rule), quota)
            quotas.setdefault(limiter, {})[rule] = quota
        if self._file is not None:
            replace_file(self._file, msgspec.json.encode(quotas))
        self._use(quotas)

    def refresh(self) -> None:
        """Use what another worker was asked for."""
        if self._file is None:
            return
        try:
            quotas = msgspec.json.decode(self._file.read_bytes(), type=Quotas)
        except FileNotFoundError:
            return
        if quotas != self._quotas:
            self._use(quotas)

    def _use(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._live.watch_beside(self._rules_of)

    def _rules_of(self, limiter: str, rules: tuple[Rule, ...]) -> dict[str, Rule]:
        """Return the candidates for the rules of a limiter; one whose rule is gone, or fits no longer, is gone as well."""
        quotas = self._quotas.get(limiter, {})
        return {rule.name: candidate_for(rule, quotas[rule.name]) for rule in rules if rule.name in quotas}

    def _rule(self, limiter: str, rule: str) -> Rule:
        found = self._live.policy.limiters.get(limiter)
        for each in found.rules if found is not None else ():
            if each.name == rule:
                return each
        raise ApiProblem(404, f"there is no rule {rule[:80]!r} in a limiter {limiter[:80]!r}")


def candidate_for(rule: Rule, quota: str) -> Rule:
    """Return a rule that is like a live one, with another quota and a name of its own; tiers stay as they are.

    Args:
        rule: The live rule.
        quota: As the policy file has it; for a `concurrent` rule a number, for a `calendar` rule one of the same span.

    Raises:
        ConfigError: That is no quota, or none for this kind of rule.
    """
    if rule.kind == "concurrent":
        other = rule.quota_from(int(quota) if quota.isdecimal() else quota)
    else:  # another period is another state, which a candidate has anyway; but a calendar's windows are the live ones
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
