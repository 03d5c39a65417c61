"""The service as a whole: HTTP, several processes, restarts, commands."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import httpx
import pytest

from headgate_services.petitions.config import PetitionRateLimitConfig
from tests.apps.conftest import Command
from tests.apps.petitions.conftest import Start
from tests.apps.petitions.support import PATH, TABLE, petition, put_bucket, rows, someone
from tests.apps.processes import service_process

COMPLETE = {
    *("type", "title", "status", "detail", "instance", "trace_id", "actor", "cycle_id", "as_of_seq"),
    *(
        "rate_limit_remaining",
        "rate_limit_reset",
        "rate_limit_limit",
        "rate_limit_current",
        "rate_limit_scope",
    ),
}


@pytest.mark.requirement("A-02", "A-03")
async def test_rate_limit_blocks_after_threshold(start: Start) -> None:
    service, submitter = await start(), someone()
    assert await service.submit_many(submitter, 11) == [201] * 10 + [429]
    assert service.petitions(submitter) == 10


@pytest.mark.requirement("A-19", "A-20")
async def test_rate_limit_allows_after_window_expires(start: Start) -> None:
    service, submitter = await start(), someone()
    assert await service.submit_many(submitter, 11) == [201] * 10 + [429]
    service.calendar.advance(minutes=60)
    assert (await service.submit(submitter)).status_code == 201
    query = f"SELECT count FROM {TABLE} WHERE submitter_id = %s AND bucket_minute = %s"
    assert service.rows(query, submitter, service.calendar.at) == [(1,)]


@pytest.mark.requirement("A-21", "A-23")
async def test_rate_limit_sliding_window_behavior(start: Start) -> None:
    """Five at minute 1 and five at minute 30: after minute 61, exactly five are free."""
    service, submitter = await start(), someone()
    service.calendar.set(10, 1)
    await service.submit_many(submitter, 5)
    service.calendar.set(10, 30)
    await service.submit_many(submitter, 5)
    service.calendar.set(11, 0, 59)
    assert (await service.submit(submitter)).status_code == 429
    service.calendar.set(11, 1)
    assert await service.submit_many(submitter, 6) == [201] * 5 + [429]


@pytest.mark.requirement("A-61", "A-62")
async def test_metrics_endpoint_exposes_rate_limit_hits(start: Start) -> None:
    service, submitter = await start(), someone()
    await service.submit_many(submitter, 11)
    text = (await service.client.get("/metrics")).text
    assert "# HELP petition_rate_limit_hits_total Total petition submissions rejected" in text
    assert await service.metric("petition_rate_limit_hits_total", submitter_id=str(submitter)) == 1


@pytest.mark.requirement("A-62")
async def test_rate_limit_counter_incremented(start: Start) -> None:
    service, submitter = await start(rate_limit=PetitionRateLimitConfig(1)), someone()
    await service.submit(submitter)
    assert await service.metric("petition_rate_limit_hits_total", submitter_id=str(submitter)) is None
    for refusals in (1, 2, 3):
        await service.submit(submitter)
        assert await service.metric("petition_rate_limit_hits_total", submitter_id=str(submitter)) == refusals


@pytest.mark.requirement("A-18", "A-22", "A-24", "A-40")
async def test_100_parallel_submissions_over_two_processes_are_exactly_10(empty_url: str) -> None:
    submitter = someone()
    variables = {
        "DATABASE_URL": empty_url,
        "PETITION_DATABASE_TIMEOUT": 60,  # patient on a busy machine
        "LOG_LEVEL": "DEBUG",  # above it, a flood shares lines
    }
    async with (
        service_process("petitions", **variables) as one,
        service_process("petitions", **variables) as two,
        httpx.AsyncClient(timeout=60) as client,
    ):
        answers = await asyncio.gather(
            *(client.post((one, two)[n % 2].url + PATH, json=petition(submitter)) for n in range(100))
        )
    assert sorted(answer.status_code for answer in answers) == [201] * 10 + [429] * 90
    for refused in (answer for answer in answers if answer.status_code == 429):
        assert refused.json().keys() == COMPLETE
        assert 3500 < int(refused.headers["retry-after"]) <= 3600
        assert refused.json()["trace_id"] == refused.headers["x-correlation-id"]
    counted = f"SELECT sum(count) FROM {TABLE} WHERE submitter_id = %s"
    assert rows(empty_url, counted, submitter) == [(10,)]
    assert rows(empty_url, "SELECT count(*) FROM petition_submissions") == [(10,)]
    events = "SELECT count(*) FROM ledger.governance_events WHERE event_type = 'petition.submission.received'"
    assert rows(empty_url, events) == [(10,)]
    refusals = "SELECT sum((payload->>'refusals')::int) FROM ledger.governance_events"
    assert rows(empty_url, f"{refusals} WHERE event_type = 'petition.submission.rate_limited'") == [(90,)]
    log = [json.loads(line) for line in (*one.log, *two.log)]
    traces = {line["trace_id"] for line in log if line["event"] == "rate_limit_exceeded"}
    assert traces == {answer.json()["trace_id"] for answer in answers if answer.status_code == 429}


@pytest.mark.requirement("A-22", "A-24")
async def test_instances_share_the_budget_and_a_restart_changes_nothing(start: Start) -> None:
    submitter = someone()
    one, two = await start(), await start()
    assert await one.submit_many(submitter, 5) == [201] * 5
    assert await two.submit_many(submitter, 5) == [201] * 5
    third = await start()
    for service in (one, two, third):
        assert (await service.submit(submitter)).status_code == 429


@pytest.fixture
def data_dir() -> Iterator[str]:
    """Provide a folder that any user can reach, for a PostgreSQL that does not run as root."""
    folder = Path(tempfile.mkdtemp(prefix="headgate-petitions-"))
    folder.chmod(0o711)
    yield str(folder / "data")
    shutil.rmtree(folder)


@pytest.mark.requirement("A-22", "A-37", "A-39")
async def test_without_a_database_it_brings_its_own_and_obeys_commands(
    data_dir: str, command: Command
) -> None:
    submitter = someone()
    variables = {"PETITION_DATA_DIR": data_dir, "PETITION_RATE_LIMIT_PER_HOUR": 2}

    async def run(*arguments: str) -> tuple[int, str]:
        return await asyncio.to_thread(command, "petitions", *arguments, **variables)

    async with (
        service_process("petitions", **variables) as service,
        httpx.AsyncClient(base_url=service.url) as client,
    ):
        assert [await status(client, submitter) for _ in range(3)] == [201, 201, 429]
        assert await run("halt", "maintenance") == (0, "")
        assert await status(client, someone()) == 503
        assert await run("resume") == (0, "")
        assert await status(client, someone()) == 201
        database = f"host={data_dir} user=postgres dbname=postgres"
        old = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(hours=3)
        put_bucket(database, someone(), old)
        assert "buckets removed: 1," in (await run("cleanup"))[1]
    async with (
        service_process("petitions", **variables) as service,
        httpx.AsyncClient(base_url=service.url) as client,
    ):
        assert await status(client, submitter) == 429


async def status(client: httpx.AsyncClient, submitter: UUID) -> int:
    return (await client.post(PATH, json=petition(submitter))).status_code
