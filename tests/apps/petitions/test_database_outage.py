"""A PostgreSQL that hangs, is gone, or does not confirm: every request ends in time, and a 503 stores nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import psycopg
import pytest
from structlog.testing import capture_logs

from headgate.testing.postgres_server import PostgresServer
from headgate_services.petitions.domain.errors import DatabaseUnavailableError
from headgate_services.petitions.infrastructure.adapters.persistence import Database
from tests.apps.conftest import Command
from tests.apps.petitions.support import PATH, Service, petition, rows, running, someone
from tests.apps.processes import PATIENCE, in_time, service_process, until
from tests.apps.timeouts import SHORT, Timeouts

pytestmark = pytest.mark.usefixtures("timeouts")


@pytest.fixture
async def service(own_url: str) -> AsyncIterator[Service]:
    """Provide a service with few connections."""
    async with running(own_url, pool_size=2, real_time=True) as service:
        assert (await service.submit(someone())).status_code == 201
        yield service


async def until_up(service: Service) -> None:
    """Return once the service has noticed that its database is back."""

    async def admits() -> bool:
        return (await service.submit(someone())).status_code == 201

    await until(admits)


def until_idle(url: str) -> None:
    """Return once the server has dealt with everything that the service has sent on connections it has given up."""
    with psycopg.connect(url, autocommit=True) as connection:
        busy = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'headgate-petitions' AND state <> 'idle'"
        while connection.execute(busy).fetchone() != (0,):
            pass


async def test_a_database_that_hangs_is_a_503_and_keeps_nothing(
    service: Service, own_server: PostgresServer
) -> None:
    submitters = [someone() for _ in range(8)]
    own_server.pause()
    answers = await in_time(asyncio.gather(*map(service.submit, submitters)))
    assert {answer.status_code for answer in answers} == {503}
    assert {answer.json()["title"] for answer in answers} == {"Database Unavailable"}
    assert answers[0].json()["type"] == "https://archon72.io/errors/database-unavailable"
    assert "retry-after" in answers[0].headers
    own_server.resume()
    await until_up(service)
    until_idle(service.url)
    assert [service.petitions(submitter) + service.count(submitter) for submitter in submitters] == [0] * 8


async def test_a_database_that_hangs_within_the_transaction_keeps_nothing(
    service: Service, own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch, timeouts: Timeouts
) -> None:
    """The petition's row is written, the rest is not answered."""
    timeouts.seconds = SHORT
    submitter = someone()
    record = service.container.rate_limiter.record_submission

    async def hang(*arguments: Any, **options: Any) -> None:
        own_server.pause()
        await record(*arguments, **options)

    monkeypatch.setattr(service.container.rate_limiter, "record_submission", hang)
    answer = await in_time(service.submit(submitter))
    assert (answer.status_code, answer.json()["title"]) == (503, "Database Unavailable")
    monkeypatch.undo()
    own_server.resume()
    await until_up(service)
    until_idle(service.url)
    assert service.petitions(submitter) + service.count(submitter) == 0


async def test_a_commit_that_is_not_confirmed_says_so(service: Service, timeouts: Timeouts) -> None:
    """A constraint that is checked at the commit waits for a lock that the test has."""
    rows(service.url, _WAIT_AT_COMMIT)
    submitter = someone()
    with psycopg.connect(service.url, autocommit=True) as connection:
        connection.execute("SELECT pg_advisory_lock(1)")
        timeouts.seconds = SHORT
        answer = await in_time(service.submit(submitter))
        body = answer.json()
        assert (answer.status_code, body["type"]) == (503, "https://archon72.io/errors/outcome-unknown")
        assert "may have been made or not" in body["detail"]
        assert "retry-after" in answer.headers
    timeouts.seconds = PATIENCE
    until_idle(service.url)
    found = (await in_time(service.client.get(f"{PATH}/{body['petition_id']}"))).status_code
    assert (found, service.count(submitter)) in ((200, 1), (404, 0))


_WAIT_AT_COMMIT = """
    CREATE FUNCTION wait_for_test() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NULL; END $$;
    CREATE CONSTRAINT TRIGGER wait_at_commit AFTER INSERT ON petition_submissions
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait_for_test();
"""


async def test_an_outage_costs_one_time_out_not_one_per_request(timeouts: Timeouts) -> None:
    timeouts.seconds = SHORT
    database = Database("postgresql://127.0.0.1:1/none", outage_seconds=30)
    await database.open()
    try:
        with capture_logs() as logs:
            async with asyncio.timeout(PATIENCE):
                while not database.is_down:
                    await _asked(database)
            assert [await _asked(database) for _ in range(100)] == [30] * 100
        assert [line["event"] for line in logs].count("database_unavailable") == 1
    finally:
        await database.aclose()


async def _asked(database: Database) -> int:
    with pytest.raises(DatabaseUnavailableError) as refused:
        await database.ping()
    return refused.value.retry_after_seconds


async def test_service_resumes_by_itself_when_the_database_is_back(
    service: Service, own_server: PostgresServer
) -> None:
    """Also after a restart, and without a request that would have to try."""
    own_server.kill()
    async with asyncio.timeout(PATIENCE):
        while not service.container.database.is_down:
            assert (await service.submit(someone())).status_code == 503
    own_server.start()
    await until(lambda: not service.container.database.is_down)
    assert (await in_time(service.submit(someone()))).status_code == 201


async def test_a_stop_ends_the_process_while_the_database_hangs(
    own_url: str, own_server: PostgresServer
) -> None:
    async with (
        service_process("petitions", DATABASE_URL=own_url, PETITION_DATABASE_TIMEOUT=3) as service,
        httpx.AsyncClient(base_url=service.url, timeout=PATIENCE) as client,
    ):
        assert (await client.post(PATH, json=petition(someone()))).status_code == 201
        own_server.pause()
        waiting = asyncio.create_task(client.post(PATH, json=petition(someone())))
        # Requests are served in turn, so once this one is answered, that one is waiting for the database.
        assert (await client.get("/health")).status_code == 200
        service.process.terminate()
        assert await in_time(service.process.wait()) in (0, -15)
        await asyncio.gather(waiting, return_exceptions=True)


def test_a_database_that_hangs_stops_start_up(
    command: Command, own_url: str, own_server: PostgresServer
) -> None:
    own_server.pause()
    code, output = command("run", "petitions", DATABASE_URL=own_url)
    assert (code, "DATABASE_URL" in output) == (2, True)
