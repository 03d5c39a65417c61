"""The pure functions against the model, on random traces."""

from __future__ import annotations

import pytest
from hypothesis import given

from headgate import Decision, Limiter, Quota
from headgate.errors import CostTooHigh
from headgate.rules import Kind, Rule
from headgate.testing import FakeClock, ReferenceStore
from headgate.testing.contract.traces import ALL_KINDS, START_US, Actor, Step, Trace, traces
from tests.model import books, limiter

Answer = tuple[int, tuple[tuple[object, ...], ...]]


class ModelActor:
    """Plays a trace's calls on the model."""

    def __init__(self, trace: Trace) -> None:
        shared: limiter.Books = {}
        self._trace = trace
        self._limiters = [
            limiter.ModelLimiter([model_rule(rule) for rule in rules], shared) for rules in trace.versions
        ]
        self._holds: list[limiter.Hold] = []

    def play(self, step: Step, now: int) -> tuple[Answer, ...]:
        """Make the call, and return what it said and what can be seen of it afterwards."""
        model, key = self._limiters[step.version], model_key(self._trace.key(step.who))
        seen = []
        if step.op in ("hit", "check"):
            seen.append(answer(getattr(model, step.op)(now, key, step.cost, step.tier)))
        elif step.op == "hold":
            figures, hold = model.hold(now, key, step.cost, step.tier)
            self._holds.append(hold)
            seen.append(answer(figures))
        elif step.op == "record":
            model.record(now, key, step.cost, step.tier)
        elif step.op == "reset":
            model.reset(key)
        elif self._holds:
            hold = self._holds.pop(step.hold % len(self._holds))
            hold.settle(now, step.cost if step.op == "settle" else 0)
        seen.append(answer(model.check(now, key, 0, step.tier)))
        return tuple(seen)


def model_rule(rule: Rule) -> limiter.Rule:
    tiers = {tier: model_quota(quota) for tier, quota in rule.tiers.items()}
    return limiter.Rule(
        rule.kind, model_quota(rule.quota), rule.name, rule.scope, tiers, rule.buckets, rule.strict
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


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_each_rule_answers_like_the_model(kind: Kind) -> None:
    @given(traces([kind], most_rules=1))
    def search(trace: Trace) -> None:
        compare(trace)

    search()


@given(traces(most_rules=3))
def test_several_rules_answer_like_the_model(trace: Trace) -> None:
    compare(trace)
