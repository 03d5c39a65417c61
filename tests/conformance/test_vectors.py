"""The shipped vectors match the model, and the pure functions match the vectors."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from headgate import Limiter
from headgate.rules import Kind
from headgate.testing import FakeClock, ReferenceStore
from headgate.testing.scenarios import Scenario, ScenarioPlayer, load_vectors
from tests.model.vectors import FOLDER, answered

SCENARIOS = [scenario for scenarios in load_vectors().values() for scenario in scenarios]


@pytest.mark.deep
@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_vectors_have_the_answers_of_the_model(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert answered(text) == text


def test_every_kind_of_rule_has_hundreds_of_steps() -> None:
    steps = dict.fromkeys(get_args(Kind), 0)
    for scenario in SCENARIOS:
        for kind in scenario.kinds:
            steps[kind] += len(scenario.steps)
    assert min(steps.values()) >= 150


def test_the_vectors_contain_refusals_and_admissions_of_every_step() -> None:
    outcomes = {
        (step.op, verdict.allowed)
        for scenario in SCENARIOS
        for step in scenario.steps
        for verdict in (step.expected[1] if step.expected else ())
    }
    ops = ("hit", "check", "hold", "confirm", "renew")
    assert outcomes == {(op, allowed) for op in ops for allowed in (True, False)}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_the_pure_functions_match_the_vectors(scenario: Scenario) -> None:
    clock = FakeClock()
    store = ReferenceStore(clock=clock)
    limiters = [Limiter(*rules, name="vectors", store=store) for rules in scenario.versions]
    player = ScenarioPlayer(clock, limiters)
    for number, step in enumerate(scenario.steps):
        assert player.play(step) == step.expected, f"step {number}: {step}"
