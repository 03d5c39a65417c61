"""Metrics of the server; those of hooks are tested where hooks are."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from headgate.decision import UNLIMITED
from headgate.errors import StoreError
from headgate.hooks import Call
from headgate.observe.prometheus import PrometheusHook
from headgate_server.metrics import CollectedDecisions, ReservedDict
from tests.server.support import Server

POLICY = """
[limiters.api]
rules = ["2/minute", { quota = "1/hour", name = "candidate", shadow = true }]
"""


async def samples(server: Server) -> dict[tuple[str, ...], float]:
    response = await server.client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


async def test_decisions_and_shadow_decisions_are_counted() -> None:
    server = Server(POLICY)
    for _ in range(3):
        await server.hit("api")
    found = await samples(server)
    assert found["headgate_decisions_total", "false", "api", "admitted", "per-minute"] == 2
    assert found["headgate_decisions_total", "false", "api", "refused", "per-minute"] == 1
    assert found["headgate_shadow_decisions_total", "api", "admitted", "candidate"] == 1
    assert found["headgate_shadow_decisions_total", "api", "refused", "candidate"] == 1
    assert found["headgate_store_up", "api"] == 1
    assert ("process_cpu_seconds_total",) in found


def test_decisions_that_are_collected_count_as_if_one_by_one() -> None:
    registries = [CollectorRegistry(), CollectorRegistry()]
    one_by_one, hook = (PrometheusHook(registry) for registry in registries)
    collected = CollectedDecisions(hook)
    down = UNLIMITED.as_degraded()
    for decision in (UNLIMITED, UNLIMITED, UNLIMITED.as_refused(), down, UNLIMITED, down):
        for operation, seconds in (("hit", 0.25), ("check", 0.0001), ("hold", 2.0), ("hit", 1.0)):
            call = Call("api", operation, "a", 1, None)  # type: ignore[arg-type]
            one_by_one.decided(call, decision, seconds)
            collected.decided(call, decision, seconds)
    collected.failed(Call("api", "hit", "a", 1, None), StoreError("down"), 1.0)
    one_by_one.failed(Call("api", "hit", "a", 1, None), StoreError("down"), 1.0)
    collected.flush()
    expected, found = (
        [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
        for registry in registries
    )
    assert found == expected


async def test_open_holds_are_counted_until_they_are_settled() -> None:
    server = Server(POLICY)
    held = await server.answer("/v1/limiters/api/hold", {"key": "a", "cost": 2})
    assert (await samples(server))["headgate_held_units", "api"] == 2
    await server.answer(f"/v1/holds/{held['hold']}/release")
    assert (await samples(server))["headgate_held_units", "api"] == 0


async def test_no_key_is_in_the_metrics() -> None:
    server = Server(POLICY + "[server]\ntop_keys = 10\n")
    for _ in range(5):
        await server.hit("api", "someone")
    assert "someone" not in (await server.client.get("/metrics")).text


def test_metric_files_reserve_their_space(tmp_path: Path) -> None:
    """To write into a page without room on the disk would end the process."""
    counts = ReservedDict(str(tmp_path / "counter_1.db"))
    for number in range(3000):
        counts.write_value(f'["headgate", "headgate", {{}}, "{number:0100}"]', number, 0.0)
        stat = (tmp_path / "counter_1.db").stat()
        assert stat.st_blocks * 512 >= stat.st_size
    assert len(list(counts.read_all_values())) == 3000
    counts.close()


def test_metric_files_are_never_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty files cannot be read: `/metrics` failed while another worker started."""
    allocate, seen = os.posix_fallocate, []

    def look(*arguments: int) -> None:
        seen.append(list(tmp_path.glob("*.db")))
        allocate(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", look)
    ReservedDict(str(tmp_path / "counter_1.db")).close()  # type: ignore[no-untyped-call]
    assert seen == [[]]
    assert [path.name for path in tmp_path.iterdir()] == ["counter_1.db"]


def test_full_disk_loses_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = ReservedDict(str(tmp_path / "counter_1.db"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        counts.write_value("x" * 70_000, 1.0, 0.0)
    counts.write_value(f"key {0:0100}", 0.0, 0.0)
    assert (tmp_path / "counter_1.db").stat().st_size == 65_536
    assert counts.read_value(f"key {0:0100}") == (0.0, 0.0)
    counts.close()
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            ReservedDict(str(tmp_path / "counter_2.db"))
        assert not (tmp_path / "counter_2.db").exists()


async def test_full_disk_keeps_other_metrics(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(POLICY + '[limiters.other]\nrules = ["2/minute"]\n')
    count = PrometheusHook.decided_alike

    def full(hook: PrometheusHook, call: Call, *rest: Any) -> None:
        if call.limiter == "api":
            raise OSError(errno.ENOSPC, "No space left on device")
        count(hook, call, *rest)

    monkeypatch.setattr(PrometheusHook, "decided_alike", full)
    await server.hit("api")
    await server.hit("other")
    shown = await samples(server)
    assert any("other" in sample for sample in shown)
    assert caplog.messages == [
        "decisions of limiter 'api' are missing in /metrics: [Errno 28] No space left on device"
    ]


async def test_holds_of_before_a_restart_are_not_counted_as_settled(tmp_path: Path) -> None:
    shared = f"[store]\nurl = 'sqlite:///{tmp_path}/limits.db'\n{POLICY}"
    before, after = Server(shared), Server(shared)
    held = await before.answer("/v1/limiters/api/hold", {"key": "a", "cost": 2})
    assert (await after.answer(f"/v1/holds/{held['hold']}/release"))["first"]
    assert (await samples(after)).get(("headgate_held_units", "api"), 0) == 0
    for server in (before, after):
        await server.live.aclose()
