"""A database that goes away and comes back, behind SQLAlchemy."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from headgate.testing.postgres_server import PostgresServer
from headgate_services.common import databases
from headgate_services.common.databases import FAILURES, DatabaseDown, SqlDatabase, database_url
from headgate_services.common.outages import Outages
from tests.apps.processes import PATIENCE


@pytest.fixture
async def database(own_url: str) -> AsyncIterator[SqlDatabase]:
    database = SqlDatabase(database_url(own_url), timeout=0.5)
    await until_back(database)
    yield database
    await database.aclose()


async def until_down(database: SqlDatabase) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                await database.ping()
            except DatabaseDown:
                return
            except OperationalError:
                await asyncio.sleep(0)  # the probe needs its turn


async def until_back(database: SqlDatabase) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await database.ping()
            except FAILURES:  # perhaps only late, on a busy machine
                await asyncio.sleep(0)


async def test_a_connection_waits_for_another_that_writes_to_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite itself refuses to switch the file to WAL, whatever timeout is set."""
    other = sqlite3.connect(tmp_path / "new.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    async def sleep(seconds: float) -> None:
        other.execute("ROLLBACK")

    monkeypatch.setattr(databases, "sleep", sleep)
    database = SqlDatabase(database_url(f"sqlite:///{tmp_path / 'new.db'}"))
    await database.ping()
    assert not other.in_transaction
    other.close()
    await database.aclose()


async def test_a_database_that_is_gone_is_asked_by_probes_only(
    database: SqlDatabase, own_server: PostgresServer
) -> None:
    own_server.kill()
    await until_down(database)
    connected = database.engine.pool.status()
    for _ in range(100):
        with pytest.raises(DatabaseDown):
            await database.ping()
    assert database.engine.pool.status() == connected
    own_server.start()
    await until_back(database)


async def test_a_failure_of_one_request_alone_is_no_outage(tmp_path: Path) -> None:
    """A file that another process has locked answers all the same."""
    database = SqlDatabase(database_url(f"sqlite:///{tmp_path / 'x.db'}"))
    with pytest.raises(OperationalError):
        async with database.connection() as connection:
            await connection.execute(text("SELECT * FROM nothing"))
    for _ in range(100):
        await database.ping()
        await asyncio.sleep(0)
    await database.aclose()


async def test_closing_waits_for_the_end_of_a_running_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe that outlives the database may lose its connection when the event loop ends."""
    started, has_ended = asyncio.Event(), False

    async def probe(database: SqlDatabase) -> None:
        nonlocal has_ended
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # closing a connection takes a moment
            has_ended = True

    monkeypatch.setattr(SqlDatabase, "_probe", probe)
    database = SqlDatabase(database_url(f"sqlite:///{tmp_path / 'x.db'}"))
    with pytest.raises(OperationalError):
        async with database.guard():
            raise OperationalError("SELECT 1", {}, Exception("no answer"))
    await asyncio.wait_for(started.wait(), PATIENCE)
    await database.aclose()
    assert has_ended


async def test_a_scheduled_probe_does_not_start_after_closing() -> None:
    probes = 0

    async def probe() -> None:
        nonlocal probes
        probes += 1

    outages = Outages("a database", 1.0, probe)
    await outages.report(OperationalError("SELECT 1", {}, Exception("no answer")))
    await outages.aclose()
    for _ in range(10):
        await asyncio.sleep(0)
    assert probes == 0
