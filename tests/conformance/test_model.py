"""The pure functions against the model, on random traces."""

from __future__ import annotations

import pytest
from hypothesis import given

from headgate import Decision, Limiter, Quota
from headgate.costs import Cost
from headgate.errors import CostTooHigh
from headgate.rules import Kind, Rule
from headgate.testing import FakeClock, ReferenceStore
from headgate.testing.contract.traces import ALL_FEATURES, ALL_KINDS, START_US, Actor, Step, Trace, traces
from tests.model import books, limiter

Answer = tuple[int, tuple[tuple[object, ...], ...]]


class ModelActor:
    """Runs the calls of a trace on the model."""

    def __init__(self, trace: Trace) -> None:
        shared: limiter.Books = {}
        self._trace = trace
        self._limiters = [
            limiter.ModelLimiter([model_rule(rule) for rule in rules], shared) for rules in trace.versions
        ]
        self._holds: list[limiter.Hold] = []

    def play(self, step: Step, now: int) -> tuple[Answer, ...]:
        """Make the call, and return its answer and the visible state afterwards."""
        model, key = self._limiters[step.version], model_key(self._trace.key(step.who))
        cost, quotas = self._trace.cost(step), self._quotas(step)
        seen = []
        if step.op == "check":
            seen.append(answer(model.check(now, key, cost, step.tier, quotas)))
        elif step.op == "hold" or (step.op in ("hit", "record") and self._trace.has_places):
            figures, hold = model.hold(now, key, cost, step.tier, quotas)
            self._holds.append(hold)
            seen.append(answer(figures))
        elif step.op == "hit":
            seen.append(answer(model.hit(now, key, cost, step.tier, quotas)))
        elif step.op == "record":
            model.record(model.request(now, key, cost, step.tier, quotas))
        elif step.op == "reset":
            model.reset(key)
        elif self._holds:
            seen += self._end(step, now, cost)
        seen.append(answer(model.check(now, key, 0, step.tier)))
        return tuple(seen)

    def _end(self, step: Step, now: int, cost: Cost) -> list[Answer]:
        """Settle, release, confirm or renew one of the open holds."""
        hold = self._holds[step.hold % len(self._holds)]
        if step.op in ("confirm", "renew") and hold.settled:
            return []
        if step.op == "renew":
            return [answer(hold.renew(now))] if self._trace.has_places and any(hold.charges) else []
        if step.op != "confirm":
            self._holds.remove(hold)
            hold.settle(now, cost if step.op == "settle" else 0)
            return []
        said = answer(hold.confirm(now, cost if step.tokens % 2 else None))
        if hold.settled:
            self._holds.remove(hold)
        return [said]

    def _quotas(self, step: Step) -> limiter.Quotas:
        return {name: model_quota(quota) for name, quota in (self._trace.quota(step) or {}).items()}


def model_rule(rule: Rule) -> limiter.Rule:
    tiers = {tier: model_quota(quota) for tier, quota in rule.tiers.items()}
    return limiter.Rule(
        rule.kind,
        model_quota(rule.quota),
        rule.name,
        rule.scope,
        tiers,
        rule.buckets,
        rule.strict,
        rule.unit,
        rule.span or "",
        rule.timezone or "",
        rule.growth,
        rule.longest_us,
    )


def model_quota(quota: Quota) -> books.Quota:
    return books.Quota(quota.limit, quota.period_us, quota.burst)


def model_key(key: object) -> limiter.Key:
    return key if isinstance(key, (str, dict)) else repr(key)


def answer(figures: list[books.Figures]) -> Answer:
    said = [(f.allowed, f.limit, f.remaining, f.retry_after, f.reset_after) for f in figures]
    return limiter.binding(figures), tuple(said)


def as_answer(decision: Decision) -> Answer:
    return decision.names.index(str(decision.rule)), tuple(tuple(verdict) for verdict in decision.verdicts)


def compare(trace: Trace) -> None:
    clock = FakeClock()
    clock.set_us(START_US)
    store = ReferenceStore(clock=clock)
    ours = Actor(trace, [Limiter(*rules, name="traces", store=store) for rules in trace.versions])
    model = ModelActor(trace)
    last: Decision | None = None
    for number, step in enumerate(trace.steps):
        clock.set_us(step.move.target(clock.now_us(), trace.period_us, last))
        said = ours.play(step)
        if said == (CostTooHigh,):
            continue
        last = said[0]
        assert (number, tuple(map(as_answer, said))) == (number, model.play(step, clock.now_us()))


@given(traces(most_rules=3, features=ALL_FEATURES, most_steps=20))
def test_units_moved_holds_places_calendars_and_quotas_answer_like_the_model(trace: Trace) -> None:
    compare(trace)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_moved_holds_of_each_rule_answer_like_the_model(kind: Kind) -> None:
    @given(traces([kind], most_rules=1, features=frozenset(("moves", "quotas"))))
    def search(trace: Trace) -> None:
        compare(trace)

    search()


@given(traces(most_rules=2, features=frozenset(("penalty",))))
def test_penalties_answer_like_the_model(trace: Trace) -> None:
    compare(trace)


@given(traces(most_rules=3))
def test_several_rules_answer_like_the_model(trace: Trace) -> None:
    compare(trace)
