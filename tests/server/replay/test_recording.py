"""Recordings, and their replay with the same decisions."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import Limiter
from headgate.decision import Decision
from headgate.errors import ConfigError, CostTooHigh
from headgate.hooks import Call
from headgate.policy import LivePolicy, parse_policy
from headgate.testing import FakeClock
from headgate_server.replay import LogCounts, LogSource, Selection, Simulation, read_requests
from headgate_server.replay.recording import DecisionRecorder

POLICIES = (
    'rules = ["5/second"]',
    'rules = ["3/second", "10/minute burst 4"]',
    'rules = [{ quota = "4/second", kind = "sliding_log" }, { quota = "20/minute", kind = "fixed_window" }]',
    'rules = [{ quota = "3/second", tiers = { pro = "6/second" } }, { quota = "2/second", name = "s", shadow = true }]',
    'rules = [{ quota = "3/second", name = "r" }]\n[[limiters.api.overrides]]\nkey = "b"\nrules = { r = "1/second" }',
    'rules = [{ quota = "2/second", scope = "*" }]',
    'rules = ["0/minute"]',
)

steps = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 3), st.integers(0, 400_000), st.integers(0, 90_000_000)),
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 5),
        st.sampled_from([None, None, "pro", "other"]),
    ),
    max_size=60,
)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@given(st.sampled_from(POLICIES), steps)
def test_a_recorded_trace_replays_with_exactly_the_live_decisions(
    text: str, trace: list[tuple[int, str, int, str | None]]
) -> None:
    with TemporaryDirectory() as folder:
        file, clock = Path(folder) / "trace.jsonl", FakeClock()
        recorder = DecisionRecorder(file, clock=clock)
        policy = parse_policy(f"[limiters.api]\n{text}\n")
        live: list[Decision] = []
        with LivePolicy(policy, hooks=[recorder], clock=clock) as limiters:
            for pause, key, cost, tier in trace:
                clock.advance_us(pause)
                try:
                    live.append(limiters["api"].hit(key, cost, tier=tier))
                except CostTooHigh:
                    continue  # not a decision, so it is not recorded
                limiters["api"].check(key)
        recorder.close()
        replayed = Simulation(policy.limiters["api"])
        if not live:
            assert file.read_bytes() == b""
            return
        with LogSource(str(file)) as source:
            requests = list(read_requests([source], Selection(limiter="api"), LogCounts()))
        assert [replayed.decide(request) for request in requests] == live
        assert [not request.was_refused for request in requests] == [bool(decision) for decision in live]


def test_lines_contain_the_call_and_its_decision(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    recorder = DecisionRecorder(file, clock=FakeClock(5))
    limiter = Limiter("1/minute", name="api", store="memory://", hooks=[recorder])
    limiter.hit("alice", tier="pro")
    limiter.hit(b"\xff")
    with limiter.hold("bob"):
        pass
    limiter.check("carol")
    limiter.hit("alice")
    found = lines(file)
    assert found[0] == {
        "headgate": 1,
        "at": 5_000_000,
        "limiter": "api",
        "operation": "hit",
        "key": "alice",
        "cost": 1,
        "tier": "pro",
        "allowed": True,
    }
    assert [(line["operation"], line["key"], line["allowed"]) for line in found[1:]] == [
        ("hit", {"hex": "ff"}, True),
        ("hold", "bob", True),
        ("hit", "alice", False),
    ]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_hashed_keys(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    allowed = Limiter("1/minute").hit("x")
    # Two processes that share a file share its salt.
    for recorder in (DecisionRecorder(file, hash_keys=True), DecisionRecorder(file, hash_keys=True)):
        for key in ("alice", b"alice", {"user": "alice"}, None):
            recorder.decided(Call("api", "hit", key, 1, None), allowed, 0.0)
        recorder.close()
    first, second = lines(file)[:4], lines(file)[4:]
    for line in (*first, *second):
        line.pop("at")
    assert first == second
    assert first[0]["key"] != first[1]["key"]
    assert first[2]["keys"] == {"user": first[0]["key"]}
    assert "alice" not in file.read_text(encoding="utf-8")
    salt = tmp_path / "trace.jsonl.salt"
    assert len(salt.read_bytes()) == 32
    assert stat.S_IMODE(salt.stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.jsonl", "trace.jsonl.salt"]


def test_the_size_of_a_recording_is_bounded_across_restarts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "trace.jsonl"
    for _ in range(3):
        recorder = DecisionRecorder(file, max_bytes=20_000)
        limiter = Limiter("1/minute", hooks=[recorder])
        for _ in range(1_000):
            limiter.hit("alice")
        recorder.close()
    assert 20_000 <= file.stat().st_size < 60_000
    assert "are no longer recorded" in caplog.text


def test_a_full_disk_ends_recording_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    limiter = Limiter("5/minute", name="login", hooks=[DecisionRecorder("/dev/full")])
    assert [bool(limiter.hit("alice")) for _ in range(6)] == [True] * 5 + [False]
    [message] = caplog.messages
    assert message.startswith("decisions are no longer recorded to /dev/full: [Errno 28] ")


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="decisions cannot be recorded"):
        DecisionRecorder(tmp_path / "no" / "such" / "folder")
