"""Numbered SQL files, each applied once and in order: the bookkeeping, for any driver.

    found = read_migrations(resources.files("myapp") / "migrations")     # 0001_create_tables.sql, 0002_…
    with psycopg.connect(url) as connection:                             # one transaction: all or nothing
        apply(lambda statement: connection.execute(statement).fetchall(), found, record="myapp_migrations")

Which ones have been applied is kept in a table of its own, `record`. On PostgreSQL, processes that migrate at the same time
wait for each other; on SQLite the transaction must be one that writes (`BEGIN IMMEDIATE`), which does the same.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Generator, Sequence
from importlib.resources.abc import Traversable
from typing import Any, Literal, NamedTuple, TypeVar

from headgate.errors import HeadgateError

__all__ = ["Migration", "MigrationError", "apply", "apply_async", "read_migrations"]

Database = Literal["postgresql", "sqlite"]
Rows = Sequence[Any]
S = TypeVar("S")
R = TypeVar("R")
T = TypeVar("T")
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
    """The database cannot be brought to the schema that this program needs."""


class Migration(NamedTuple):
    """One numbered step towards the schema."""

    number: int
    name: str
    text: str


def read_migrations(folder: Traversable) -> list[Migration]:
    """Return the migrations of a folder, in order; files with other names than `0001_create_tables.sql` are left out."""
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
    """Apply what is missing, in the transaction under way, and return it.

    Args:
        execute: Runs a statement, which may be a whole file, and returns its rows; none for one that has none.
        migrations: All migrations of this version, in order.
        record: The table in which applied ones are kept.
        database: Which dialect to use for the bookkeeping.
        refuse_newer: Whether a database with migrations that are not in the list is an error; otherwise they are left alone.
        must_write: Whether a database that can only be read is an error of the driver's, also if nothing is missing.

    Raises:
        MigrationError: The database is newer.
    """
    return drive(_steps(migrations, record, database, refuse_newer, must_write), execute)


async def apply_async(
    execute: Callable[[str], Awaitable[Rows]],
    migrations: Sequence[Migration],
    record: str,
    database: Database = "postgresql",
    *,
    refuse_newer: bool = False,
    must_write: bool = False,
) -> list[Migration]:
    """As `apply`, with a coroutine function to execute statements."""
    return await drive_async(_steps(migrations, record, database, refuse_newer, must_write), execute)


def drive(flow: Generator[S, R, T], run: Callable[[S], R]) -> T:
    """Run the statements that a flow asks for, and return what it returns."""
    try:
        statement = next(flow)
        while True:
            statement = flow.send(run(statement))
    except StopIteration as stop:
        result: T = stop.value
        return result


async def drive_async(flow: Generator[S, R, T], run: Callable[[S], Awaitable[R]]) -> T:
    """As `drive`, with a coroutine function."""
    try:
        statement = next(flow)
        while True:
            statement = flow.send(await run(statement))
    except StopIteration as stop:
        result: T = stop.value
        return result


def _steps(
    migrations: Sequence[Migration], record: str, database: Database, refuse_newer: bool, must_write: bool
) -> _Steps:
    """Yield the statements one by one; each is answered by its rows."""
    if database == "postgresql":
        yield _LOCK.format(record)
    ((exists,),) = yield _EXISTS[database].format(record)
    if not exists:
        yield _CREATE.format(record)
    if must_write:
        yield f"UPDATE {record} SET name = name WHERE number < 0"  # changes nothing, and is refused all the same
    applied = {number for (number,) in (yield f"SELECT number FROM {record}")}
    newer = applied - {migration.number for migration in migrations}
    if refuse_newer and newer:
        raise MigrationError(f"it has migration {max(newer)}, which a newer version of this program made")
    missing = [migration for migration in migrations if migration.number not in applied]
    for migration in missing:
        yield migration.text
        yield f"INSERT INTO {record} (number, name) VALUES ({migration.number}, '{migration.name}')"
    return missing
