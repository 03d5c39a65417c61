"""Replay decides as live limiters on real servers do, with the same requests at the same times."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headgate.stores import Store, open_store
from headgate_server.replay import ReplayedLimiter
from tests.server.replay.traces import POLICIES, live_decisions, policy, requests, steps


@pytest.fixture(scope="module", params=["redis", "valkey", "postgres"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    store = open_store(request.getfixturevalue(f"headgate_{request.param}_url"))
    yield store
    store.close()


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(text=st.sampled_from(POLICIES), trace=steps)
def test_replay_equals_live_decisions(
    store: Store, text: str, trace: list[tuple[int, str, int, str | None]]
) -> None:
    limiter = policy(text)
    logged = requests(trace)
    live = live_decisions(replace(limiter, name=secrets.token_hex(8)), store, logged)
    replayed = ReplayedLimiter(limiter)
    assert [replayed.decide(request) for request in logged] == live
