"""Migrations: numbered SQL files, each applied once and in order, with any driver.

    found = read_migrations(resources.files("myapp") / "migrations")     # 0001_create_tables.sql, 0002_…
    with psycopg.connect(url) as connection:                             # one transaction: all or nothing
        apply(lambda statement: connection.execute(statement).fetchall(), found, record="myapp_migrations")

The table `record` lists the applied migrations. On PostgreSQL, an advisory lock serialises processes that migrate at the
same time; on SQLite the caller begins a write transaction (`BEGIN IMMEDIATE`) for this purpose.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Generator, Sequence
from importlib.resources.abc import Traversable
from typing import Any, Literal, NamedTuple

from headgate._steps import run, run_async
from headgate.errors import HeadgateError

__all__ = ["Migration", "MigrationError", "apply", "apply_async", "read_migrations"]

Database = Literal["postgresql", "sqlite"]
Rows = Sequence[Any]
_Steps = Generator[str, Rows, list["Migration"]]

_FILE = re.compile(r"([0-9]{3,4})_([a-z0-9_]+)\.sql")
_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('{}', 0))"
_EXISTS = {
    "postgresql": "SELECT to_regclass('{}') IS NOT NULL",
    "sqlite": "SELECT count(*) > 0 FROM sqlite_master WHERE type = 'table' AND name = '{}'",
}
_CREATE = """
    CREATE TABLE {} (
        number INTEGER NOT NULL PRIMARY KEY,
        name TEXT NOT NULL,
        applied_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT CURRENT_TIMESTAMP
    )
"""


class MigrationError(HeadgateError):
    """The database cannot be migrated to the schema of this program."""


class Migration(NamedTuple):
    """One numbered step towards the schema."""

    number: int
    name: str
    text: str


def read_migrations(folder: Traversable) -> list[Migration]:
    """Return the migrations of a folder, in order; only files with names like `0001_create_tables.sql` are read."""
    found = [(match, file) for file in folder.iterdir() if (match := _FILE.fullmatch(file.name))]
    return sorted(
        Migration(int(match[1]), match[2].replace("_", " "), file.read_text("utf-8")) for match, file in found
    )


def apply(
    execute: Callable[[str], Rows],
    migrations: Sequence[Migration],
    record: str,
    database: Database = "postgresql",
    *,
    refuse_newer: bool = False,
    must_write: bool = False,
) -> list[Migration]:
    """Apply missing migrations in the current transaction, and return them.

    Args:
        execute: Executes a statement or a whole file, and returns its rows; an empty sequence if there are no rows.
        migrations: All migrations of this version, in order.
        record: The table of applied migrations.
        database: The SQL dialect.
        refuse_newer: Whether unknown applied migrations are an error; otherwise they are ignored.
        must_write: Whether a read-only database is an error of the driver even if no migration is missing.

    Raises:
        MigrationError: The database is newer.
    """
    return run(_steps(migrations, record, database, refuse_newer, must_write), execute)


async def apply_async(
    execute: Callable[[str], Awaitable[Rows]],
    migrations: Sequence[Migration],
    record: str,
    database: Database = "postgresql",
    *,
    refuse_newer: bool = False,
    must_write: bool = False,
) -> list[Migration]:
    """Like `apply`, but `execute` is a coroutine function."""
    return await run_async(_steps(migrations, record, database, refuse_newer, must_write), execute)


def _steps(
    migrations: Sequence[Migration], record: str, database: Database, refuse_newer: bool, must_write: bool
) -> _Steps:
    """Yield statements one by one, and receive their rows."""
    if database == "postgresql":
        yield _LOCK.format(record)
    ((exists,),) = yield _EXISTS[database].format(record)
    if not exists:
        yield _CREATE.format(record)
    if must_write:
        yield f"UPDATE {record} SET name = name WHERE number < 0"  # changes nothing, but fails on a read-only database
    applied = {number for (number,) in (yield f"SELECT number FROM {record}")}
    newer = applied - {migration.number for migration in migrations}
    if refuse_newer and newer:
        raise MigrationError(f"it has migration {max(newer)}, which a newer version of this program made")
    missing = [migration for migration in migrations if migration.number not in applied]
    for migration in missing:
        yield migration.text
        yield f"INSERT INTO {record} (number, name) VALUES ({migration.number}, '{migration.name}')"
    return missing
