"""SQLite and PostgreSQL behind SQLAlchemy, so that neither is waited for longer than an operator allows."""

from __future__ import annotations

import re
import sqlite3
from asyncio import sleep
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any, Literal, cast

from sqlalchemy import URL, Connection, NullPool, event, make_url, text
from sqlalchemy.exc import ArgumentError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from headgate import StoreUnavailable
from headgate.migrations import Migration, MigrationError, apply_async
from headgate.stores.sqlite_file import switch_to_wal
from headgate.urls import check_credentials
from headgate_services.common.deadlines import DEFAULT_LIMIT, within
from headgate_services.common.outages import Outages
from headgate_services.common.settings import SettingsError

_SQLITE_WAIT_SECONDS = 15.0  # for other processes that are writing: they take turns, and do not hang
_STATEMENT_END = re.compile(r";[ \t]*$", re.MULTILINE)
DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
}


def database_url(text: str) -> URL:
    """Return the URL of a database, with the driver that we use for it.

    Raises:
        ValueError: That is not a database that we know. The message does not repeat the URL, which may have a password.
        ConfigError: Its password needs to be percent-encoded.
    """
    check_credentials(text)
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise ValueError("is not a URL like postgresql://user@host/name") from None
    if url.get_backend_name() not in DRIVERS:
        raise ValueError("must begin with postgresql:// or sqlite:///")
    return url.set(drivername=DRIVERS[url.get_backend_name()])


class DatabaseDown(SQLAlchemyError):
    """The database was not asked, because it is known to be down."""


FAILURES = (OperationalError, InterfaceError, PoolTimeout, DatabaseDown)
"""What is raised if the database cannot be asked."""


class SqlDatabase:
    """A database behind SQLAlchemy that no request waits for longer than `timeout`, and none while it is down.

    Args:
        url: Where it is, with an asynchronous driver.
        timeout: Seconds that PostgreSQL has for a block.
    """

    def __init__(self, url: URL, timeout: float = DEFAULT_LIMIT) -> None:
        self._url = url
        self._timeout = timeout
        self.engine = create_engine(url, timeout)
        # SQLite: a transaction that reads first and writes later is refused at once if another wrote in between.
        # One that says at its beginning that it will write waits for its turn instead.
        self.writing_engine = self.engine.execution_options(begin_sqlite="BEGIN IMMEDIATE")
        self._outages = Outages(f"the database of {url.get_backend_name()}", timeout, self._probe)

    @asynccontextmanager
    async def guard(self) -> AsyncIterator[None]:
        """Give a block its deadline, and notice when the database is down.

        Raises:
            DatabaseDown: It is known to be down, and was not asked.
        """
        if self._outages.is_down:
            raise DatabaseDown("the database is down")
        try:
            with within(self._timeout):
                yield
        except FAILURES as error:
            await self._outages.report(error)
            raise

    @asynccontextmanager
    async def connection(self, *, writing: bool = False) -> AsyncIterator[AsyncConnection]:
        """Provide a connection; what a block that writes has changed is kept if it ends well."""
        async with self.guard():
            if writing:
                async with self.writing_engine.begin() as connection:
                    yield connection
            else:
                async with self.engine.connect() as connection:
                    yield connection

    async def apply(self, migrations: Sequence[Migration], record: str) -> list[Migration]:
        """Bring the tables to the schema that this program needs, and return the migrations that were missing.

        Raises:
            MigrationError: The database has migrations that this program does not know: it is newer.
        """
        async with self.writing_engine.begin() as connection:

            async def execute(text: str) -> Sequence[Any]:
                rows: Sequence[Any] = ()
                for statement in statements_of(text):
                    result = await connection.exec_driver_sql(statement)
                    rows = result.all() if result.returns_rows else ()
                return rows

            dialect = cast(Literal["postgresql", "sqlite"], connection.dialect.name)
            return await apply_async(execute, migrations, record, dialect, refuse_newer=True, must_write=True)

    async def check(self, migrations: Sequence[Migration], record: str) -> None:
        """Bring the tables up to date, at start-up.

        Raises:
            SettingsError: The database cannot be used.
        """
        try:
            _try_sqlite(self._url)
            await self.apply(migrations, record)
        except (MigrationError, OSError, sqlite3.Error, SQLAlchemyError) as error:
            raise SettingsError(f"DATABASE_URL: {problem_with(error)}") from error

    async def ping(self) -> None:
        """Ask the database for an answer; raises what SQLAlchemy raises if there is none."""
        async with self.connection() as connection:
            await connection.execute(text("SELECT 1"))

    async def aclose(self) -> None:
        """Close all connections."""
        await self._outages.aclose()
        await self.engine.dispose()

    async def _probe(self) -> None:
        # Not from the pool, whose connections may all be waiting for an answer.
        engine = create_engine(self._url, self._timeout, poolclass=NullPool)
        try:
            async with engine.connect() as connection:
                await connection.execute(text("SELECT 1"))
        except (SQLAlchemyError, OSError) as error:
            raise StoreUnavailable(problem_with(error)) from error
        finally:
            await engine.dispose()


def statements_of(text: str) -> Iterator[str]:
    """Yield the statements of a file, each closed by a semicolon at the end of a line.

    No driver takes several at once on both databases.
    """
    for part in _STATEMENT_END.split(text):
        if re.sub(r"--.*", "", part).strip():
            yield part


def create_engine(url: URL, timeout: float, **options: Any) -> AsyncEngine:
    """Return an engine for a database; PostgreSQL has `timeout` seconds for a connection, and for each answer.

    A transaction on SQLite begins as the execution option `begin_sqlite` says. `options` are SQLAlchemy's.
    """
    if url.get_backend_name() != "sqlite":
        from headgate_services.common.postgres import BoundedConnection  # SQLite does without psycopg

        bounds: dict[str, Any] = {"async_creator_fn": BoundedConnection.connect, "limit": timeout}
        if not options:
            options = {"pool_pre_ping": True, "pool_timeout": timeout}
        return create_async_engine(url, connect_args=bounds, **options)
    engine = create_async_engine(url, connect_args={"timeout": _SQLITE_WAIT_SECONDS}, **options)
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


def _try_sqlite(url: URL) -> None:
    """Open a database file once and close it again; nothing happens for another kind of database.

    For start-up: when opening fails, the thread of the asynchronous driver may outlive the event loop and complain of it
    on standard error.

    Raises:
        sqlite3.Error: It cannot be opened, or is not a database.
    """
    if url.get_backend_name() == "sqlite":
        with closing(sqlite3.connect(url.database or "")) as connection:
            connection.execute("PRAGMA schema_version")


def problem_with(error: Exception) -> str:
    """Return what a database said, without the statement that SQLAlchemy puts around it."""
    inner = getattr(error, "orig", None) if isinstance(error, SQLAlchemyError) else None
    return str(inner or error).strip()


def _prepare_sqlite(connection: Any, record: object) -> None:
    # The driver would begin transactions by its own rules, and leave CREATE TABLE out of them; we say BEGIN ourselves.
    connection.isolation_level = None
    cursor: sqlite3.Cursor = connection.cursor()
    cursor.execute("PRAGMA foreign_keys = ON")
    switch_to_wal(
        cursor.execute,
        _SQLITE_WAIT_SECONDS,
        pause=lambda seconds: connection.run_async(lambda _: sleep(seconds)),
    )
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("begin_sqlite", "BEGIN"))
