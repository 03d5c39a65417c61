"""A server records its decisions if the policy says so, and the recording can be replayed."""

from __future__ import annotations

from pathlib import Path

import httpx

from headgate_server.cli import main
from headgate_server.replay import LogCounts, LogSource, Selection, read_requests
from tests.server.support import refusal, serving

POLICY = """
[server]
record = "trace.jsonl"
record_keys = "{keys}"
[limiters.api]
rules = ["3/hour"]
store = "sqlite:///limits.db"
"""


def test_all_workers_record_to_one_file(tmp_path: Path) -> None:
    with serving(tmp_path, POLICY.format(keys="plain"), workers=2) as server:
        answers = [
            httpx.post(f"{server.url}/v1/limiters/api/hit", json={"key": key}).json()["allowed"]
            for key in ("alice", "bob") * 5
        ]
        httpx.post(f"{server.url}/v1/limiters/api/check", json={"key": "alice"}).raise_for_status()
    counts = LogCounts()
    with LogSource(str(tmp_path / "trace.jsonl")) as source:
        requests = list(read_requests([source], Selection(limiter="api"), counts))
    assert not counts.bad
    assert [(request.key, not request.was_refused) for request in requests] == list(
        zip(("alice", "bob") * 5, answers, strict=True)
    )
    assert main(["replay", str(tmp_path / "trace.jsonl"), "--config", str(tmp_path / "headgate.toml")]) == 0


def test_keys_are_hashed_if_asked(tmp_path: Path) -> None:
    with serving(tmp_path, POLICY.format(keys="hashed")) as server:
        httpx.post(f"{server.url}/v1/limiters/api/hit", json={"key": "alice"}).raise_for_status()
    text = (tmp_path / "trace.jsonl").read_text(encoding="utf-8")
    assert text.count("\n") == 1
    assert "alice" not in text


def test_nothing_is_recorded_by_default(tmp_path: Path) -> None:
    with serving(tmp_path, '[limiters.api]\nrules = ["3/hour"]\n') as server:
        httpx.post(f"{server.url}/v1/limiters/api/hit", json={"key": "alice"}).raise_for_status()
    assert not list(tmp_path.glob("*.jsonl"))


def test_a_server_that_cannot_record_does_not_start(tmp_path: Path) -> None:
    policy = POLICY.format(keys="plain").replace("trace.jsonl", "no/such/folder/trace.jsonl")
    assert "decisions cannot be recorded" in refusal(tmp_path, policy)
