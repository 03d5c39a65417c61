"""Several worker processes of one service: shared limits and metrics, and an error without a shared store."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from uuid import uuid4

import httpx
import pytest

from headgate.testing.servers import RedisServer
from headgate_services import mail, telegram, tiers
from headgate_services.common import workers
from tests.apps.conftest import Command
from tests.apps.processes import PATIENCE, client_of, environment, launch_program, service_process, serving

MAIL = {"GLOBAL_SEND_RATE_LIMIT_PER_MINUTE": "10"}
TIERS = {"SAJU_ENABLE_RATE_LIMITING": "true"}
TELEGRAM = {"TELEGRAM_BOT_TOKEN": "1:x", "TELEGRAM_WEBHOOK_SECRET": "x", "RATE_LIMIT_KV": "memory://"}


def total(text: str, series: str) -> float:
    """Return the sum of the samples whose line begins with these characters."""
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(series))


async def responses(url: str, method: str, path: str, bodies: list[object]) -> tuple[Counter[int], str]:
    """Send requests at once, each on its own connection; return their statuses and then the metrics."""

    async def send(body: object) -> int:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
            return (await client.request(method, path, json=body)).status_code

    statuses = Counter(await asyncio.gather(*map(send, bodies)))
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        return statuses, (await client.get("/metrics")).text


@pytest.mark.requirement("S-26")
async def test_two_workers_of_tiers_share_buckets_and_metrics(tmp_path: Path) -> None:
    with RedisServer() as redis:
        variables = {
            **TIERS,
            "SAJU_ENABLE_ATOMIC_RATE_LIMITER": "true",
            "SAJU_REDIS_URL": redis.url,
            "SAJU_REDIS_TIMEOUT": PATIENCE,
            "SAJU_RATE_LIMITS": "anonymous=1 burst 1",
        }
        async with service_process("tiers", tmp_path, workers=2, **variables) as service:
            statuses, text = await responses(service.url, "GET", "/v1/whoami", [None] * 100)
    assert statuses == {200: 1, 429: 99}
    assert total(text, "saju_rate_limit_429_total") == 99
    assert total(text, "saju_rate_limit_decisions_total") == 100
    assert total(text, 'saju_rate_limit_limit{tier="anonymous"') == 1


async def test_two_workers_of_petitions_share_counters_and_metrics(tmp_path: Path, empty_url: str) -> None:
    body = {"type": "GENERAL", "text": "Hear us", "submitter_id": str(uuid4())}
    variables = {"DATABASE_URL": empty_url, "PETITION_DATABASE_TIMEOUT": PATIENCE}
    async with service_process("petitions", tmp_path, workers=2, **variables) as service:
        statuses, text = await responses(service.url, "POST", "/v1/petition-submissions", [body] * 40)
    assert statuses == {201: 10, 429: 30}
    assert total(text, "petition_rate_limit_hits_total{") == 30
    assert total(text, "petition_rate_limit_checks_total{") == 40
    assert total(text, "petition_queue_depth{") == 10


@pytest.mark.parametrize(
    ("service", "variables", "named"),
    [("mail", MAIL, "RATE_LIMIT_STORE"), ("tiers", TIERS, "SAJU_REDIS_URL")],
)
def test_several_workers_on_a_limit_in_memory_are_refused(
    command: Command, service: str, variables: dict[str, str], named: str
) -> None:
    code, output = command("run", service, "--workers", "2", **variables)
    assert code == 2
    assert "--workers: 2 processes would each count for themselves" in output
    assert named in output


@pytest.mark.parametrize("variables", [{}, {**MAIL, "RATE_LIMIT_STORE": "sqlite:///limits.db"}])
def test_mail_without_a_limit_or_with_a_shared_store_may_have_workers(
    command: Command, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    """Processes that share a store are in test_concurrency.py."""
    started: list[Any] = []
    monkeypatch.setattr("headgate_services.common.starting.run_workers", lambda *args: started.extend(args))
    assert command("run", "mail", "--port", "0", "--workers", "2", **variables)[0] == 0
    function, _, listener, number, _ = started
    listener.close()
    assert (callable(resolve_name(function)), number) == (True, 2)


@pytest.mark.parametrize(
    ("service", "variables", "named"),
    [
        (mail, MAIL, "RATE_LIMIT_STORE"),
        (tiers, TIERS, "SAJU_REDIS_URL"),
        (telegram, TELEGRAM, "RATE_LIMIT_KV"),
    ],
    ids=["mail", "tiers", "telegram"],
)
async def test_a_second_worker_on_a_limit_in_memory_is_an_error(
    service: Any,
    variables: dict[str, str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workers, "_is_first_worker", lambda name: False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    async with client_of(service.create_app()):
        pass
    [error] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "one of several worker processes" in error
    assert named in error


async def test_a_process_that_runs_a_service_twice_is_one_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = mail.Settings(global_send_rate_limit_per_minute=10)
    for _ in range(2):
        async with client_of(mail.create_app(settings)):
            pass
    assert "one of several worker processes" not in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="detection needs abstract sockets")
async def test_workers_that_uvicorn_starts_are_detected(tmp_path: Path) -> None:
    arguments = ("--factory", "headgate_services.mail:create_app", "--port", "0", "--workers", "2")
    process = await launch_program(
        *arguments, folder=tmp_path, environment=environment(**MAIL), module="uvicorn"
    )
    async with serving(process, workers=2) as service:
        pass
    assert "".join(service.log).count("one of several worker processes") == 1
