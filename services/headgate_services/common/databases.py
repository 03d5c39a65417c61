"""SQLite and PostgreSQL behind SQLAlchemy, with a time limit for every block."""

from __future__ import annotations

import re
import sqlite3
from asyncio import sleep
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from importlib import resources
from typing import Any, ClassVar, Literal, cast

from sqlalchemy import URL, Connection, NullPool, event, make_url, text
from sqlalchemy.exc import ArgumentError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from headgate import StoreUnavailable
from headgate.migrations import Migration, MigrationError, apply_async, read_migrations
from headgate.stores.sqlite_file import switch_to_wal
from headgate.urls import check_credentials
from headgate_services.common.deadlines import DEFAULT_LIMIT, within
from headgate_services.common.outages import Outages
from headgate_services.common.settings import SettingsError

_SQLITE_WAIT_SECONDS = 15.0  # the longest wait for another process that is writing
_STATEMENT_END = re.compile(r";[ \t]*$", re.MULTILINE)
DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
}


def database_url(text: str) -> URL:
    """Return the URL of a database with its asynchronous driver.

    Raises:
        ValueError: The URL is invalid or names another kind of database. The message does not repeat the URL, because
            it may contain a password.
        ConfigError: The password must be percent-encoded.
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
    """The database is down, and the request failed without a query."""


FAILURES = (OperationalError, InterfaceError, PoolTimeout, DatabaseDown)
"""Errors that mean that the database is unavailable."""


class SqlDatabase:
    """A database behind SQLAlchemy. Requests wait at most `timeout` seconds, and fail at once while it is down.

    Attributes:
        package: The package with the folder `migrations`.
        record: The table of applied migrations.

    Args:
        url: The URL of the database, with an asynchronous driver.
        timeout: Time limit of a block on PostgreSQL, in seconds.
    """

    package: ClassVar[str]
    record: ClassVar[str]

    def __init__(self, url: URL, timeout: float = DEFAULT_LIMIT) -> None:
        self._url = url
        self._timeout = timeout
        self.engine = create_engine(url, timeout)
        # SQLite refuses a transaction that reads first and writes later if another one wrote in between.
        # With BEGIN IMMEDIATE it waits for the lock instead.
        self.writing_engine = self.engine.execution_options(begin_sqlite="BEGIN IMMEDIATE")
        self._outages = Outages(f"the database of {url.get_backend_name()}", timeout, self._probe)

    @asynccontextmanager
    async def guard(self) -> AsyncIterator[None]:
        """Apply the time limit to a block, and report failures of the database.

        Raises:
            DatabaseDown: The database is known to be down.
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
        """Provide a connection; with `writing`, changes are committed at the end of the block."""
        async with self.guard():
            if writing:
                async with self.writing_engine.begin() as connection:
                    yield connection
            else:
                async with self.engine.connect() as connection:
                    yield connection

    @classmethod
    def migrations(cls) -> list[Migration]:
        """Return the migrations for SQLite and PostgreSQL, in order."""
        return read_migrations(resources.files(cls.package).joinpath("migrations"))

    async def migrate(self, migrations: Sequence[Migration] | None = None) -> list[Migration]:
        """Apply missing migrations, and return them.

        Raises:
            MigrationError: The database has migrations of a newer version of this program.
        """
        async with self.writing_engine.begin() as connection:

            async def execute(text: str) -> Sequence[Any]:
                rows: Sequence[Any] = ()
                for statement in statements_of(text):
                    result = await connection.exec_driver_sql(statement)
                    rows = result.all() if result.returns_rows else ()
                return rows

            dialect = cast(Literal["postgresql", "sqlite"], connection.dialect.name)
            known = self.migrations() if migrations is None else migrations
            return await apply_async(execute, known, self.record, dialect, refuse_newer=True, must_write=True)

    async def prepare(self) -> None:
        """Apply missing migrations at start-up.

        Raises:
            SettingsError: The database cannot be used.
        """
        try:
            _try_sqlite(self._url)
            await self.migrate()
        except (MigrationError, OSError, sqlite3.Error, SQLAlchemyError) as error:
            raise SettingsError(f"DATABASE_URL: {problem_with(error)}") from error

    async def ping(self) -> None:
        """Run a query; raises SQLAlchemy's errors if that fails."""
        async with self.connection() as connection:
            await connection.execute(text("SELECT 1"))

    async def aclose(self) -> None:
        """Close all connections."""
        await self._outages.aclose()
        await self.engine.dispose()

    async def _probe(self) -> None:
        # Not from the pool: all its connections may be waiting for a reply.
        engine = create_engine(self._url, self._timeout, poolclass=NullPool)
        try:
            async with engine.connect() as connection:
                await connection.execute(text("SELECT 1"))
        except (SQLAlchemyError, OSError) as error:
            raise StoreUnavailable(problem_with(error)) from error
        finally:
            await engine.dispose()


def statements_of(text: str) -> Iterator[str]:
    """Yield the statements of an SQL file; each ends with a semicolon at the end of a line.

    Not every driver accepts several statements at once.
    """
    for part in _STATEMENT_END.split(text):
        if re.sub(r"--.*", "", part).strip():
            yield part


def create_engine(url: URL, timeout: float, **options: Any) -> AsyncEngine:
    """Create an engine. On PostgreSQL, connecting and every reply may take `timeout` seconds.

    On SQLite, the execution option `begin_sqlite` is the statement that begins a transaction. `options` are SQLAlchemy's.
    """
    if url.get_backend_name() != "sqlite":
        from headgate_services.common.postgres import BoundedConnection  # SQLite does not need psycopg

        bounds: dict[str, Any] = {"async_creator_fn": BoundedConnection.connect, "limit": timeout}
        if not options:
            options = {"pool_pre_ping": True, "pool_timeout": timeout}
        return create_async_engine(url, connect_args=bounds, **options)
    engine = create_async_engine(url, connect_args={"timeout": _SQLITE_WAIT_SECONDS}, **options)
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


def _try_sqlite(url: URL) -> None:
    """Open and close the file of an SQLite database; do nothing for other databases.

    When the asynchronous driver fails to open a file, its thread may outlive the event loop and print a traceback.

    Raises:
        sqlite3.Error: The file cannot be opened, or is not a database.
    """
    if url.get_backend_name() == "sqlite":
        with closing(sqlite3.connect(url.database or "")) as connection:
            connection.execute("PRAGMA schema_version")


def problem_with(error: Exception) -> str:
    """Return the message of the database, without the statement that SQLAlchemy adds."""
    inner = getattr(error, "orig", None) if isinstance(error, SQLAlchemyError) else None
    return str(inner or error).strip()


def _prepare_sqlite(connection: Any, record: object) -> None:
    # The driver would leave CREATE TABLE out of transactions; `_begin_sqlite` sends BEGIN instead.
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
