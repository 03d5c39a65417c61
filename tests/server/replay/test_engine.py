"""Replay makes the same decisions as live limiters, in memory for the live keys only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.testing.reference import ReferenceStore
from headgate_server.replay import LoggedRequest, ReplayedLimiter, needs_key, scopes_of
from tests.server.replay.traces import POLICIES, live_decisions, policy, requests, steps


@given(st.sampled_from(POLICIES), steps)
def test_replay_equals_live_decisions_of_the_reference(
    text: str, trace: list[tuple[int, str, int, str]]
) -> None:
    logged = requests(trace)
    limiter = ReplayedLimiter(policy(text))
    assert [limiter.decide(request) for request in logged] == live_decisions(
        policy(text), ReferenceStore(), logged
    )


def test_shadow_rules_refuse_nothing_and_are_counted() -> None:
    limiter = ReplayedLimiter(
        policy('rules = ["9/second", { quota = "2/second", name = "s", shadow = true }]')
    )
    for request in requests([(0, "a", 1, None)] * 5):
        decision = limiter.decide(request)
        assert decision is not None
        assert decision.allowed
    assert limiter.shadow_counts()["s"]._asdict() == {"asked": 5, "refused": 3, "failed": 0, "admitted": 0}


def test_memory_holds_only_live_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ten keys per second, each live for a second and a bucket; expired keys are dropped.
    monkeypatch.setattr("headgate_server.replay.simulation.MAX_KEYS", 100)
    limiter = ReplayedLimiter(policy('rules = ["5/second"]'))
    for number in range(20_000):
        key = f"key-{number}"
        limiter.decide(LoggedRequest(number * 100_000, number, key, key, 1, None, None, False))
    assert limiter.overflowed == 0


def test_requests_that_find_memory_full_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate_server.replay.simulation.MAX_KEYS", 100)
    limiter = ReplayedLimiter(policy('rules = ["5/second"]'))
    for request in requests([(0, f"key-{number}", 1, None) for number in range(150)]):
        limiter.decide(request)
    assert limiter.overflowed > 0


@pytest.mark.parametrize(
    ("text", "scopes", "keyed"),
    [
        ('rules = ["5/second"]', (), True),
        ('rules = [{ quota = "5/second", scope = "*" }]', (), False),
        (
            """rules = [{ quota = "5/second", scope = "user" }, { quota = "5/second", scope = "*" },
            { quota = "1/s", scope = "ip", shadow = true }]""",
            ("user", "ip"),
            True,
        ),
    ],
)
def test_scopes_of_a_limiter(text: str, scopes: tuple[str, ...], keyed: bool) -> None:
    assert scopes_of(policy(text)) == scopes
    assert needs_key(policy(text)) is keyed
