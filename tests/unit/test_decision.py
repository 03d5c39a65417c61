"""Decisions: the rule that binds, texts for people, copies and pickles."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import Decision, RateLimited, RuleResult
from headgate.decision import UNLIMITED, Verdict

YES = Verdict(True, 10, 7, None, 30_000_000)
TIGHT = Verdict(True, 5, 1, None, 60_000_000)
NO = Verdict(False, 5, 0, 20_000_000, 40_000_000)
LATER = Verdict(False, 8, 2, 25_000_000, 26_000_000)
NEVER = Verdict(False, 0, 0, None, None)


def made(*verdicts: Verdict) -> Decision:
    return Decision.make(tuple(f"rule{i}" for i in range(len(verdicts))), verdicts)


def test_a_decision_of_one_rule_has_that_rules_figures() -> None:
    decision = made(YES)
    assert decision.allowed is True
    assert (decision.limit, decision.remaining, decision.retry_after, decision.reset_after) == (
        10,
        7,
        None,
        30.0,
    )
    assert (decision.retry_after_us, decision.reset_after_us) == (None, 30_000_000)
    assert (decision.rule, decision.denied_by, decision.degraded) == ("rule0", None, False)
    assert decision.results == (RuleResult("rule0", True, 10, 7, None, 30.0),)
    assert decision.verdicts == (YES,)


@pytest.mark.parametrize(
    ("verdicts", "binding"),
    [
        ((YES, TIGHT), 1),
        ((TIGHT, YES), 0),
        ((TIGHT, TIGHT), 0),
        ((YES, NO), 1),
        ((NO, TIGHT), 0),
        ((NO, LATER), 1),
        ((LATER, NO), 0),
        ((NO, NO, TIGHT), 0),
        ((TIGHT, NO, YES, LATER), 3),
        ((LATER, NEVER, NO), 1),
        ((NEVER, LATER), 0),
        ((YES, NEVER, NEVER), 1),
        ((TIGHT._replace(remaining=0), NO._replace(remaining=9)), 1),
        ((TIGHT._replace(remaining=0), YES), 0),
        ((NO._replace(retry_after_us=0), YES), 0),
    ],
)
def test_refusal_reports_the_longest_wait_and_admission_the_least_remaining(
    verdicts: tuple[Verdict, ...], binding: int
) -> None:
    decision = made(*verdicts)
    assert decision.rule == f"rule{binding}"
    assert (decision.limit, decision.remaining) == verdicts[binding][1:3]
    assert decision.allowed == all(verdict.allowed for verdict in verdicts)
    assert decision.verdicts == verdicts
    assert [result.name for result in decision.results] == [f"rule{i}" for i in range(len(verdicts))]
    assert [result.allowed for result in decision.results] == [verdict.allowed for verdict in verdicts]


def test_without_rules_nothing_applies() -> None:
    decision = Decision.make((), ())
    assert decision is UNLIMITED
    assert decision.allowed
    assert decision.results == ()
    assert decision.verdicts == ()
    nothing = (decision.limit, decision.remaining, decision.retry_after, decision.reset_after, decision.rule)
    assert nothing == (None,) * 5


def test_decision_is_true_if_it_admits() -> None:
    assert made(YES)
    assert not made(NO)
    assert UNLIMITED


def test_raise_if_denied_returns_an_admission_and_raises_a_refusal() -> None:
    admitted, refused = made(YES), made(NO)
    assert admitted.raise_if_denied() is admitted
    with pytest.raises(RateLimited) as caught:
        refused.raise_if_denied()
    assert caught.value.decision is refused


# --- Texts for people ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decision", "text"),
    [
        (made(YES), "allowed by rule0: 7 of 10 left"),
        (made(NO), "denied by rule0: 0 of 5 left, retry in 20 s"),
        (made(NO._replace(retry_after_us=1)), "denied by rule0: 0 of 5 left, retry in 0.000001 s"),
        (
            made(NO._replace(retry_after_us=2_592_000_000_000)),
            "denied by rule0: 0 of 5 left, retry in 2592000 s",
        ),
        (made(NO._replace(retry_after_us=1_500_000)), "denied by rule0: 0 of 5 left, retry in 1.5 s"),
        (made(NEVER), "denied by rule0: 0 of 0 left, never admitted"),
        (UNLIMITED, "allowed: no rule applies"),
        (
            made(YES).as_degraded(),
            "allowed by rule0: 7 of 10 left (degraded: the store could not be reached)",
        ),
        (UNLIMITED.as_degraded(), "allowed: no rule applies (degraded: the store could not be reached)"),
    ],
)
def test_decision_has_a_readable_text(decision: Decision, text: str) -> None:
    assert str(decision) == f"{decision}" == text


@given(st.integers(1, 366 * 24 * 3_600_000_000))
def test_a_wait_is_written_exactly_and_without_an_exponent(retry_after_us: int) -> None:
    text = str(made(NO._replace(retry_after_us=retry_after_us)))
    seconds = text.split("retry in ")[1].removesuffix(" s")
    assert set(seconds) <= set("0123456789.")
    assert round(float(seconds) * 1_000_000) == retry_after_us


def test_the_repr_shows_every_figure() -> None:
    assert repr(made(NO)) == (
        "Decision(allowed=False, limit=5, remaining=0, retry_after=20.0, reset_after=40.0, rule='rule0')"
    )
    assert repr(made(YES).as_degraded()).endswith("rule='rule0', degraded=True)")


# --- Derived ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decision", [made(YES), made(NO), made(YES, NO), UNLIMITED])
def test_degraded_decision_differs_only_in_its_flag(decision: Decision) -> None:
    degraded = decision.as_degraded()
    assert isinstance(degraded, Decision)
    assert degraded.degraded
    assert not decision.degraded
    assert degraded != decision
    for figure in ("allowed", "limit", "remaining", "retry_after", "reset_after", "rule", "verdicts"):
        assert getattr(degraded, figure) == getattr(decision, figure)
    assert Decision.make(decision.names, decision.verdicts, degraded=True) == degraded


def test_admission_changed_to_a_refusal_keeps_its_figures() -> None:
    admitted = made(YES, TIGHT)
    refused = admitted.as_refused()
    assert isinstance(refused, Decision)
    assert not refused
    assert (refused.limit, refused.remaining, refused.retry_after, refused.reset_after) == (5, 1, 0.0, 60.0)
    assert (refused.denied_by, refused.names) == ("rule1", admitted.names)
    assert made(NO).as_refused() == made(NO)


@pytest.mark.parametrize("decision", [made(YES), made(NO), made(YES, NO), made(YES).as_degraded(), UNLIMITED])
def test_decision_can_be_copied_and_pickled(decision: Decision) -> None:
    for other in (copy.copy(decision), copy.deepcopy(decision), pickle.loads(pickle.dumps(decision))):
        assert type(other) is Decision
        assert other == decision
        assert hash(other) == hash(decision)
        assert other.results == decision.results
        assert str(other) == str(decision)
