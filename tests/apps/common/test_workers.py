"""Several processes of one service: one limit, one set of figures, and a refusal where that cannot be."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from headgate.testing.postgres_server import new_database
from headgate.testing.servers import RedisServer

NAMES = ("DATABASE_URL", "HOST", "PORT", "LOG_LEVEL", "ENVIRONMENT", "RATE_LIMIT_STORE")
PATIENCE = 60


async def launch(service: str, folder: Path, *arguments: str, **variables: str) -> Process:
    """Start a service as an operator would."""
    kept = {name: value for name, value in os.environ.items() if name not in NAMES}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headgate_server.cli", "run", service, "--port", "0", *arguments),
        cwd=folder,
        env={**kept, **variables},
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=PIPE,
    )


@asynccontextmanager
async def two_workers(service: str, folder: Path, **variables: str) -> AsyncIterator[str]:
    """Run two processes of a service, and provide where they listen once both answer."""
    process = await launch(service, folder, "--workers", "2", **variables)
    assert process.stderr is not None
    url, started, log = "", 0, ""
    try:
        async with asyncio.timeout(PATIENCE):
            while not url or started < 2:
                line = (await process.stderr.readline()).decode()
                assert line, f"{service} did not start:\n{log}"
                log += line
                started += "startup complete" in line
                if found := re.search(r"running on (http://[^\s\"]+)", line):
                    url = found[1]
        drained = asyncio.create_task(process.stderr.read())
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), PATIENCE)
    await drained


def total(text: str, series: str) -> float:
    """Return the sum of the samples whose line begins with these characters."""
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(series))


async def test_two_workers_of_tiers_share_the_buckets_and_the_figures(tmp_path: Path) -> None:
    with RedisServer() as redis:
        variables = {
            "SAJU_ENABLE_RATE_LIMITING": "true",
            "SAJU_ENABLE_ATOMIC_RATE_LIMITER": "true",
            "SAJU_REDIS_URL": redis.url,
            "SAJU_REDIS_TIMEOUT": str(PATIENCE),
            "SAJU_RATE_LIMITS": "anonymous=1 burst 10",
        }
        async with two_workers("tiers", tmp_path, **variables) as url:
            statuses, text = await asked(url, "GET", "/v1/whoami", [None] * 40)
    assert statuses == {200: 10, 429: 30}
    assert total(text, "saju_rate_limit_429_total") == 30
    assert total(text, "saju_rate_limit_decisions_total") == 40
    assert total(text, 'saju_rate_limit_limit{tier="anonymous"') == 1


async def test_two_workers_of_petitions_share_the_counters_and_the_figures(
    tmp_path: Path, headgate_postgres_server: str
) -> None:
    with new_database(headgate_postgres_server) as database:
        submitter = str(uuid4())
        body = {"type": "GENERAL", "text": "Hear us", "submitter_id": submitter}
        variables = {"DATABASE_URL": database, "PETITION_DATABASE_TIMEOUT": str(PATIENCE)}
        async with two_workers("petitions", tmp_path, **variables) as url:
            statuses, text = await asked(url, "POST", "/v1/petition-submissions", [body] * 40)
    assert statuses == {201: 10, 429: 30}
    assert total(text, "petition_rate_limit_hits_total{") == 30
    assert total(text, 'http_requests_total{endpoint="/v1/petition-submissions"') == 40
    assert total(text, "petition_queue_depth{") == 10


async def asked(url: str, method: str, path: str, bodies: list[object]) -> tuple[Counter[int], str]:
    """Make requests on connections of their own, all at once; return their statuses, and the metrics afterwards."""

    async def decide(body: object) -> int:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
            return (await client.request(method, path, json=body)).status_code

    statuses = Counter(await asyncio.gather(*map(decide, bodies)))
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        return statuses, (await client.get("/metrics")).text


@pytest.mark.parametrize(
    ("service", "variables", "named"),
    [
        ("mail", {"GLOBAL_SEND_RATE_LIMIT_PER_MINUTE": "10"}, "RATE_LIMIT_STORE"),
        ("tiers", {"SAJU_ENABLE_RATE_LIMITING": "true"}, "SAJU_REDIS_URL"),
    ],
)
async def test_several_workers_on_a_limit_in_memory_are_refused(
    service: str, variables: dict[str, str], named: str, tmp_path: Path
) -> None:
    process = await launch(service, tmp_path, "--workers", "2", **variables)
    _, log = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode == 2
    assert "--workers: 2 processes would each count for themselves" in log.decode()
    assert named in log.decode()


async def test_mail_without_a_limit_or_with_a_shared_store_may_have_workers(tmp_path: Path) -> None:
    variables = {
        "GLOBAL_SEND_RATE_LIMIT_PER_MINUTE": "5",
        "RATE_LIMIT_STORE": f"sqlite:///{tmp_path / 'limits.db'}",
    }
    async with two_workers("mail", tmp_path, **variables) as url:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
            inbox = (await client.get("/v1/inboxes")).json()["items"][0]["id"]
        mail = {"inbox_id": inbox, "to": ["ann@example.com"], "subject": "Hi", "body": ""}
        statuses, _ = await asked(url, "POST", "/v1/messages", [mail] * 20)
    assert statuses == {201: 5, 429: 15}


@pytest.mark.skipif(sys.platform != "linux", reason="detection needs abstract sockets")
@pytest.mark.parametrize(
    ("service", "variables", "named"),
    [
        ("mail", {"GLOBAL_SEND_RATE_LIMIT_PER_MINUTE": "10"}, "RATE_LIMIT_STORE"),
        ("tiers", {"SAJU_ENABLE_RATE_LIMITING": "true"}, "SAJU_REDIS_URL"),
        (
            "telegram",
            {"TELEGRAM_BOT_TOKEN": "1:x", "TELEGRAM_WEBHOOK_SECRET": "x", "RATE_LIMIT_KV": "memory://"},
            "RATE_LIMIT_KV",
        ),
    ],
)
async def test_workers_that_uvicorn_starts_on_a_limit_in_memory_are_an_error(
    service: str, variables: dict[str, str], named: str, tmp_path: Path
) -> None:
    log = await uvicorn_log(service, 2, tmp_path, variables)
    assert log.count("one of several worker processes") == 1
    assert named in log


async def test_one_worker_of_uvicorn_on_a_limit_in_memory_is_no_error(tmp_path: Path) -> None:
    variables = {"GLOBAL_SEND_RATE_LIMIT_PER_MINUTE": "10"}
    assert "worker processes" not in await uvicorn_log("mail", 1, tmp_path, variables)


async def uvicorn_log(service: str, workers: int, folder: Path, variables: dict[str, str]) -> str:
    """Run a service under uvicorn until all workers have started, and return its log."""
    kept = {name: value for name, value in os.environ.items() if name not in NAMES}
    factory = f"headgate_services.{service}:create_app"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "uvicorn", "--factory", factory),
        *("--port", "0", "--workers", str(workers)),
        cwd=folder,
        env={**kept, **variables},
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=PIPE,
    )
    assert process.stderr is not None
    log = ""
    try:
        async with asyncio.timeout(PATIENCE):
            while log.count("startup complete") < workers:
                line = (await process.stderr.readline()).decode()
                assert line, f"{service} did not start:\n{log}"
                log += line
    finally:
        if process.returncode is None:
            process.terminate()
        rest, _ = await asyncio.gather(process.stderr.read(), process.wait())
    return log + rest.decode()
