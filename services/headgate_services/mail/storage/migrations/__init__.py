"""Numbered SQL files, each applied once, in order, in a transaction of its own.

A runner of our own rather than Alembic: the steps are plain SQL that both databases understand, so what is left to do is
reading files in order and remembering the numbers, and Alembic would bring a configuration, an environment script and a
dependency for it.

A file is statements, each closed by a semicolon at the end of a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

_FILE = re.compile(r"(?P<number>[0-9]{4})_(?P<name>[a-z0-9_]+)\.sql")
_STATEMENT_END = re.compile(r";[ \t]*$", re.MULTILINE)

# An arbitrary number that no other program should use as its advisory lock.
_LOCK = 0x6865_6164_6761_7465

_CREATE_RECORD = """
    CREATE TABLE IF NOT EXISTS headgate_mail_migrations (
        number INTEGER NOT NULL PRIMARY KEY,
        name TEXT NOT NULL,
        applied_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT CURRENT_TIMESTAMP
    )
"""


class MigrationError(Exception):
    """The database cannot be brought to the form that this program needs."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered step."""

    number: int
    name: str
    sql: str

    def statements(self) -> Iterator[str]:
        """Yield the statements, one by one: no driver takes several at once on both databases."""
        for part in _STATEMENT_END.split(self.sql):
            if re.sub(r"--.*", "", part).strip():
                yield part


def all_migrations() -> list[Migration]:
    """Return every step, in order."""
    files = [(file, _FILE.fullmatch(file.name)) for file in resources.files(__name__).iterdir()]
    steps = [
        Migration(int(match["number"]), match["name"], file.read_text(encoding="utf-8"))
        for file, match in files
        if match
    ]
    return sorted(steps, key=lambda step: step.number)


async def migrate(connection: AsyncConnection, steps: Sequence[Migration]) -> list[int]:
    """Apply the steps that were not applied yet, and return their numbers.

    The connection is in a transaction that writes: others who start at the same time wait for it, and a step that fails
    takes all of this call's back with it.

    Raises:
        MigrationError: The database has steps that this program does not know: it is newer.
    """
    if connection.dialect.name == "postgresql":  # SQLite's writers wait for each other anyway
        await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    await connection.execute(text(_CREATE_RECORD))
    done = set(await connection.scalars(text("SELECT number FROM headgate_mail_migrations")))
    if unknown := done - {step.number for step in steps}:
        raise MigrationError(f"it has migration {max(unknown)}, which a newer version of this program made")
    missing = [step for step in steps if step.number not in done]
    for step in missing:
        for statement in step.statements():
            await connection.exec_driver_sql(statement)
        await connection.execute(
            text("INSERT INTO headgate_mail_migrations (number, name) VALUES (:number, :name)"),
            {"number": step.number, "name": step.name},
        )
    return [step.number for step in missing]
