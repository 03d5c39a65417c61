"""A server records its decisions if the policy says so, and the recording can be replayed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from headgate_server import open_app
from headgate_server.cli import main
from headgate_server.replay import LogCounts, LogSource, Selection, read_requests
from tests.server.support import refusal

POLICY = """
[server]
record = "trace.jsonl"
record_keys = "{keys}"
[limiters.api]
rules = ["3/hour"]
store = "sqlite:///limits.db"
"""


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "headgate.toml"


def ask(config: Path, *keys: str, operation: str = "hit") -> list[bool]:
    """Call a new worker for each key; return whether it admitted."""
    return [asyncio.run(_ask(config, key, operation)) for key in keys]


async def _ask(config: Path, key: str, operation: str) -> bool:
    app = open_app(config)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        response = await client.post(f"/v1/limiters/api/{operation}", json={"key": key})
    await app.live.aclose()
    return bool(response.json()["allowed"])


def test_all_workers_record_to_one_file(config: Path) -> None:
    config.write_text(POLICY.format(keys="plain"))
    answers = ask(config, *("alice", "bob") * 5)
    ask(config, "alice", operation="check")
    counts = LogCounts()
    with LogSource("trace.jsonl") as source:
        requests = list(read_requests([source], Selection(limiter="api"), counts))
    assert not counts.bad
    assert [(request.key, not request.was_refused) for request in requests] == list(
        zip(("alice", "bob") * 5, answers, strict=True)
    )
    assert main(["replay", "trace.jsonl", "--config", str(config)]) == 0


def test_keys_are_hashed_if_asked(config: Path) -> None:
    config.write_text(POLICY.format(keys="hashed"))
    ask(config, "alice")
    text = Path("trace.jsonl").read_text(encoding="utf-8")
    assert text.count("\n") == 1
    assert "alice" not in text


def test_nothing_is_recorded_by_default(config: Path) -> None:
    config.write_text('[limiters.api]\nrules = ["3/hour"]\n')
    ask(config, "alice")
    assert not list(config.parent.glob("*.jsonl"))


def test_a_server_that_cannot_record_does_not_start(tmp_path: Path) -> None:
    policy = POLICY.format(keys="plain").replace("trace.jsonl", "no/such/folder/trace.jsonl")
    assert "decisions cannot be recorded" in refusal(tmp_path, policy)
