"""The tables, as numbered SQL files that SQLite and PostgreSQL both understand.

A file is statements, each closed by a semicolon at the end of a line: no driver takes several at once on both databases.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any, Literal, cast

from sqlalchemy.ext.asyncio import AsyncConnection

from headgate.migrations import Migration, apply_async, read_migrations

_STATEMENT_END = re.compile(r";[ \t]*$", re.MULTILINE)


def all_migrations() -> list[Migration]:
    """Return the migrations, in order."""
    return read_migrations(resources.files(__name__))


async def migrate(connection: AsyncConnection, migrations: Sequence[Migration]) -> list[Migration]:
    """Apply what is missing, in the transaction under way, which must be one that writes, and return it.

    Raises:
        MigrationError: The database has migrations that this program does not know: it is newer.
    """

    async def execute(text: str) -> Sequence[Any]:
        rows: Sequence[Any] = ()
        for statement in statements_of(text):
            result = await connection.exec_driver_sql(statement)
            rows = result.all() if result.returns_rows else ()
        return rows

    dialect = cast(Literal["postgresql", "sqlite"], connection.dialect.name)
    return await apply_async(
        execute, migrations, "headgate_mail_migrations", dialect, refuse_newer=True, must_write=True
    )


def statements_of(text: str) -> Iterator[str]:
    """Yield the statements of a file, one by one."""
    for part in _STATEMENT_END.split(text):
        if re.sub(r"--.*", "", part).strip():
            yield part
