"""Test vectors: the expected answers of every rule, step by step, computed by an independent model.

`tests/model/vectors.py` computes the answers in `vectors/*.json`. The files are shipped, so that a store in any language can
be tested with them. A file is a list of scenarios; a scenario has

    name       its subject
    versions   the limiter's rules, followed by the same rules with other limits; all versions share their states
    steps      one call each, in order

and a step has

    op         hit, check, hold, settle, confirm, renew, record or reset
    now        microseconds since the epoch
    version    index of the rules in force
    key, cost, tier
    quotas     limits, and bursts of token buckets, by rule name; they replace the tier's
    hold       for a hold: its number; for a settle, confirm or renew: the number of the hold
    binds      index of the most restrictive rule, whose values the decision has
    verdicts   per rule: allowed, limit, remaining, retry_after_us, reset_after_us

Operations without an answer (settle, record, reset) have no `verdicts`; a cost, version or `binds` of 0 and a missing tier
are left out. A cost is a number, or an object by unit. The cost of a settle or confirm is the final cost of the hold. For a
settle it may exceed the held units; the excess is then recorded. A confirm without a cost confirms all held units.

The period of a concurrent rule is its lease. A calendar rule also has a span and a time zone. The limit of a penalty is a
number of refusals, and its period the duration; it may have `growth` and `longest_us`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from headgate import Decision, Hold, Limiter, Quota, Rule
from headgate.costs import Cost
from headgate.decision import Verdict
from headgate.keys import Key
from headgate.rules import Kind, make_rule
from headgate.testing.clock import FakeClock

Expected = tuple[int, tuple[Verdict, ...]] | None


@dataclass(frozen=True)
class ScenarioStep:
    """One call and its expected answer."""

    op: str
    now: int
    key: Key
    cost: Cost = 0
    version: int = 0
    tier: str | None = None
    hold: int | None = None
    binds: int = 0
    verdicts: Sequence[Sequence[Any]] | None = None
    quotas: Mapping[str, Mapping[str, int]] | None = None

    @property
    def expected(self) -> Expected:
        """The expected answer."""
        return (
            None if self.verdicts is None else (self.binds, tuple(Verdict(*each) for each in self.verdicts))
        )


@dataclass(frozen=True)
class Scenario:
    """A limiter's rules, in several versions, and a series of calls."""

    name: str
    versions: tuple[tuple[Rule, ...], ...]
    steps: tuple[ScenarioStep, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its rules."""
        return tuple(rule.kind for rule in self.versions[0])

    @property
    def features(self) -> frozenset[str]:
        """The features that a store needs for this scenario, besides counting rates."""
        found = set(self.kinds) & {"concurrent", "calendar", "penalty"}
        if any(isinstance(step.cost, Mapping) for step in self.steps):
            found.add("units")
        if any(step.op in ("confirm", "renew") for step in self.steps):
            found.add("moves")
        if any(step.quotas for step in self.steps):
            found.add("quotas")
        return frozenset(found)

    def __str__(self) -> str:
        return self.name


class ScenarioPlayer:
    """Plays the steps of a scenario on limiters that share a store, one per version of the rules."""

    def __init__(self, clock: FakeClock, limiters: Sequence[Limiter]) -> None:
        self._clock = clock
        self._limiters = limiters
        self._holds: dict[int | None, Hold] = {}

    def play(self, step: ScenarioStep) -> Expected:
        """Make the call at its time, and return its answer."""
        self._clock.set_us(step.now)
        limiter = self._limiters[step.version]
        if step.op == "settle":
            self._holds[step.hold].settle(step.cost)
        elif step.op == "confirm":
            return _answer(self._holds[step.hold].confirm(step.cost or None))
        elif step.op == "renew":
            return _answer(self._holds[step.hold].renew())
        elif step.op == "record":
            limiter.record(step.key, step.cost, tier=step.tier)
        elif step.op == "reset":
            limiter.reset(step.key)
        else:
            return _answer(self._decide(limiter, step))
        return None

    def _decide(self, limiter: Limiter, step: ScenarioStep) -> Decision:
        quota = _quotas(limiter, step)
        if step.op == "hit":
            return limiter.hit(step.key, step.cost, tier=step.tier, quota=quota)
        if step.op == "check":
            return limiter.check(step.key, step.cost, tier=step.tier, quota=quota)
        assert step.op == "hold", step.op
        hold = self._holds[step.hold] = limiter.hold(step.key, step.cost, tier=step.tier, quota=quota)
        return hold.decision


def _quotas(limiter: Limiter, step: ScenarioStep) -> dict[str, Quota] | None:
    periods = {rule.name: rule.quota.period_us for rule in limiter.rules}
    if step.quotas is None:
        return None
    return {
        name: Quota(quota["limit"], periods[name], quota.get("burst")) for name, quota in step.quotas.items()
    }


def load_vectors() -> dict[str, tuple[Scenario, ...]]:
    """Return the scenarios of every vector file by its name."""
    files = (resources.files("headgate.testing") / "vectors").iterdir()
    return {
        file.name: tuple(_scenario(raw) for raw in json.loads(file.read_text(encoding="utf-8")))
        for file in sorted(files, key=lambda file: file.name)
    }


def _answer(decision: Decision) -> Expected:
    return decision.names.index(str(decision.rule)), decision.verdicts


def _scenario(raw: dict[str, Any]) -> Scenario:
    versions = tuple(tuple(_rule(**rule) for rule in version) for version in raw["versions"])
    return Scenario(raw["name"], versions, tuple(ScenarioStep(**step) for step in raw["steps"]))


def _rule(kind: Kind, limit: int, period_us: int, burst: int | None = None, **options: Any) -> Rule:
    tiers = {
        tier: Quota(quota["limit"], period_us, quota.get("burst"))
        for tier, quota in options.pop("tiers", {}).items()
    }
    return make_rule(kind, Quota(limit, period_us, burst), tiers=tiers, **options)
