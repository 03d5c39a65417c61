"""SQLite and PostgreSQL behind SQLAlchemy, so that neither is waited for longer than an operator allows."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any

from sqlalchemy import URL, Connection, event, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from headgate.urls import check_credentials

_SQLITE_WAIT_SECONDS = 15.0  # for other processes that are writing: they take turns, and do not hang
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


def create_engine(url: URL, timeout: float) -> AsyncEngine:
    """Return an engine for a database; PostgreSQL has `timeout` seconds for a connection, and for each answer.

    A transaction on SQLite begins as the execution option `begin_sqlite` says.
    """
    if url.get_backend_name() != "sqlite":
        from headgate_services.common.postgres import BoundedConnection  # SQLite does without psycopg

        bounds: dict[str, Any] = {"async_creator_fn": BoundedConnection.connect, "limit": timeout}
        return create_async_engine(url, pool_pre_ping=True, pool_timeout=timeout, connect_args=bounds)
    engine = create_async_engine(url, connect_args={"timeout": _SQLITE_WAIT_SECONDS})
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


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


def problem_with(error: Exception) -> str:
    """Return what a database said, without the statement that SQLAlchemy puts around it."""
    inner = getattr(error, "orig", None) if isinstance(error, SQLAlchemyError) else None
    return str(inner or error).strip()


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
