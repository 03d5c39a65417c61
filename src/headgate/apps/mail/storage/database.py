"""The connection to the database, and the two kinds of session on it."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any

from sqlalchemy import URL, Connection, event
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from headgate.apps.mail.storage.migrations import Migration, all_migrations, migrate

_SQLITE_WAIT_SECONDS = 15.0  # for other processes that are writing


class Database:
    """Sessions on one database.

    Args:
        url: Where it is, with an asynchronous driver.
    """

    def __init__(self, url: URL) -> None:
        self.engine = _create_engine(url)
        self._readers = async_sessionmaker(self.engine, expire_on_commit=False)
        # SQLite: a transaction that reads first and writes later is refused at once if another wrote in between.
        # One that says at its beginning that it will write waits for its turn instead.
        self._writers = async_sessionmaker(
            self.engine.execution_options(begin_sqlite="BEGIN IMMEDIATE"), expire_on_commit=False
        )

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncSession]:
        """Run a block that only reads, at one moment of what others write."""
        async with self._readers() as session:
            yield session

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncSession]:
        """Run a block whose changes are stored together when it ends, or not at all if it raises."""
        async with self._writers() as session, session.begin():
            yield session

    async def migrate(self, steps: Sequence[Migration] | None = None) -> list[int]:
        """Bring the tables to the form that this program needs, and return the numbers of the steps it took.

        Raises:
            MigrationError: The database is newer than this program.
        """
        writing = self.engine.execution_options(begin_sqlite="BEGIN IMMEDIATE")
        async with writing.begin() as connection:
            return await migrate(connection, all_migrations() if steps is None else steps)

    async def aclose(self) -> None:
        """Close all connections."""
        await self.engine.dispose()


def try_sqlite(url: URL) -> None:
    """Open a database file once and close it again; nothing happens for another kind of database.

    For start-up: when opening fails, the thread of the asynchronous driver may outlive the event loop and complain of it
    on standard error.

    Raises:
        sqlite3.Error: It cannot be opened, or is not a database.
    """
    if url.get_backend_name() == "sqlite":
        with closing(sqlite3.connect(url.database or "")) as connection:
            connection.execute("PRAGMA schema_version")


def _create_engine(url: URL) -> AsyncEngine:
    if url.get_backend_name() != "sqlite":
        return create_async_engine(url, pool_pre_ping=True)
    engine = create_async_engine(url, connect_args={"timeout": _SQLITE_WAIT_SECONDS})
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, record: object) -> None:
    # The driver would begin transactions by its own rules, and leave CREATE TABLE out of them; we say BEGIN ourselves.
    connection.isolation_level = None
    cursor: sqlite3.Cursor = connection.cursor()
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("begin_sqlite", "BEGIN"))
