"""The database: migrations, and the same service on SQLite and on PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import DBAPIError

from headgate.migrations import Migration
from headgate_services.common.databases import statements_of
from headgate_services.mail import Settings
from headgate_services.mail.storage.database import MailDatabase
from headgate_services.mail.storage.models import Base, Inbox
from tests.apps.mail.conftest import Start


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty database of each kind."""
    if request.param == "postgres":
        return str(request.getfixturevalue("empty_url"))
    return f"sqlite:///{tmp_path / 'empty.db'}"


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[MailDatabase]:
    database = MailDatabase(Settings(database_url=url).sqlalchemy_url())
    try:
        yield database
    finally:
        await database.aclose()


async def tables(database: MailDatabase) -> set[str]:
    async with database.engine.connect() as connection:
        return set(await connection.run_sync(lambda sync: inspect(sync).get_table_names()))


def shape(connection: Connection) -> dict[str, Any]:
    """Return the comparable part of the schema."""
    looked = inspect(connection)
    # SQLite reports the declared types unchanged.
    typed = connection.dialect.name != "sqlite"
    return {
        table: (
            [
                (column["name"], str(column["type"]) if typed else "", column["nullable"])
                for column in looked.get_columns(table)
            ],
            looked.get_pk_constraint(table)["constrained_columns"],
            sorted(
                (key["constrained_columns"], key["referred_table"], key["options"].get("ondelete"))
                for key in looked.get_foreign_keys(table)
            ),
            sorted(
                (index["name"], str(index["column_names"]), index["unique"])
                for index in looked.get_indexes(table)
            ),
        )
        for table in looked.get_table_names()
        if table != "headgate_mail_migrations"
    }


@pytest.mark.filterwarnings("ignore:Skipped unsupported reflection of expression-based index")
async def test_the_migrations_make_the_tables_that_the_models_describe(database_url: str) -> None:
    async with opened(database_url) as database:
        await database.migrate()
        async with database.engine.connect() as connection:
            migrated = await connection.run_sync(shape)
        assert set(migrated) == set(Base.metadata.tables)
        async with database.engine.begin() as connection:
            await connection.run_sync(Base.metadata.drop_all)
            await connection.run_sync(Base.metadata.create_all)
        async with database.engine.connect() as connection:
            described = await connection.run_sync(shape)
    assert migrated == described


def test_migrations_are_numbered_without_gaps() -> None:
    numbers = [step.number for step in MailDatabase.migrations()]
    assert numbers == list(range(1, len(numbers) + 1))


async def test_processes_that_start_together_do_not_migrate_twice(database_url: str) -> None:
    async with opened(database_url) as one, opened(database_url) as two:
        applied = await asyncio.gather(one.migrate(), two.migrate(), one.migrate(), two.migrate())
    assert sorted(applied) == [[], [], [], MailDatabase.migrations()]


async def test_a_migration_that_fails_leaves_nothing_behind(database_url: str) -> None:
    bad = Migration(9, "bad", "CREATE TABLE half (id TEXT);\nCREATE TABLE half (id TEXT);\n")
    async with opened(database_url) as database:
        with pytest.raises(DBAPIError):
            await database.migrate([*MailDatabase.migrations(), bad])
        assert await tables(database) == set()
        await database.migrate()
        with pytest.raises(DBAPIError):
            await database.migrate([*MailDatabase.migrations(), bad])
        assert "half" not in await tables(database)


def test_a_file_is_split_into_its_statements() -> None:
    sql = "-- one; two\nCREATE TABLE a (\n  x TEXT -- y;z\n);\n\n-- the end\n"
    [statement] = statements_of(sql)
    assert statement.strip().endswith(")")


async def test_writers_wait_for_each_other(database_url: str) -> None:
    """On SQLite, a transaction that reads first and writes later would be refused at once."""
    async with opened(database_url) as database:
        await database.migrate()

        async def read_then_write(number: int) -> None:
            async with database.writing() as session:
                await session.execute(text("SELECT count(*) FROM inboxes"))
                session.add(
                    Inbox(
                        id=str(number),
                        email_address=f"{number}@x.test",
                        name="x",
                        provider_config={},
                        created_at=datetime.now(UTC),
                    )
                )

        await asyncio.gather(*(read_then_write(number) for number in range(20)))
        async with database.reading() as session:
            assert await session.scalar(text("SELECT count(*) FROM inboxes")) == 20


@pytest.mark.requirement("N-27", "N-36")
async def test_the_whole_way_on_both_databases(start: Start, database_url: str) -> None:
    service = await start(database_url=database_url, global_send_rate_limit_per_minute=3, real_provider=True)
    file = {"filename": "ü.bin", "content_type": "application/x", "content_base64": "AAEC/w=="}
    first = (await service.send("demo@demo.nornweave.local", "a@example.com", attachments=[file])).json()
    service.clock.advance(2)
    reply = (await service.send(reply_to_thread_id=first["thread_id"], body="100% sure_")).json()
    assert (await service.send(reply_to_thread_id="nowhere")).status_code == 404
    await service.send()
    assert (await service.send(attachments=[file])).status_code == 429

    stored = await service.messages()
    assert (stored["count"], stored["total"]) == (4, 4)
    message = await service.get(f"/v1/messages/{reply['id']}")
    assert message["subject"] == "Hello"
    assert message["from_address"] == "demo@demo.nornweave.local"
    assert message["to_addresses"] == ["ann@example.com"]
    assert message["timestamp"] == message["created_at"] == "2023-11-14T22:14:02Z"
    assert len(message["references"]) == 1

    thread = await service.get(f"/v1/threads/{first['thread_id']}")
    assert [turn["role"] for turn in thread["messages"]] == ["assistant", "user", "assistant"]
    found = await service.get("/v1/messages", inbox_id=service.inbox_id, q="0% SURE_")
    assert [item["id"] for item in found["items"]] == [reply["id"]]

    [attachment] = (await service.get("/v1/attachments", message_id=first["id"]))["items"]
    content = await service.client.get(f"/v1/attachments/{attachment['id']}/content")
    assert content.content == b"\x00\x01\x02\xff"
    assert (await service.get("/v1/demo/outbox"))["total"] == 3

    assert (await service.client.delete(f"/v1/inboxes/{service.inbox_id}")).status_code == 204
    assert (await service.messages())["total"] == 0
    assert (await service.client.get(f"/v1/threads/{first['thread_id']}")).status_code == 404
    assert (await service.client.get(f"/v1/attachments/{attachment['id']}/content")).status_code == 404


async def test_text_that_postgres_cannot_store_is_refused_before_it_is_sent(
    start: Start, empty_url: str
) -> None:
    service = await start(database_url=empty_url)
    for fields in ({"subject": "a\0"}, {"body": "\0"}, {"inbox_id": "\0"}, {"reply_to_thread_id": "\0"}):
        assert (await service.send(**fields)).status_code == 422
    assert (await service.send("a\0@x.com")).status_code == 422
    assert service.provider.calls == []
    for path in ("/v1/messages/%00", "/v1/threads/%00", "/v1/inboxes/%00", "/v1/attachments/%00/content"):
        assert (await service.client.get(path)).status_code == 422
    assert (await service.client.get("/v1/messages?q=%00&inbox_id=x")).status_code == 422
