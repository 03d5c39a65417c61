"""Migrations: numbered SQL files, each applied once, in order."""

from __future__ import annotations

from importlib import resources
from typing import Any

from headgate.migrations import Migration, apply_async, read_migrations
from headgate_services.petitions.infrastructure.adapters.persistence.database import Database

_TIMEOUT = 300  # seconds: another instance may be migrating, and tables may be large


def all_migrations() -> list[Migration]:
    """Return the migrations, in order."""
    return read_migrations(resources.files("headgate_services.petitions").joinpath("migrations"))


async def migrate(database: Database) -> list[Migration]:
    """Apply missing migrations, and return them. Instances that start at the same time wait for each other."""
    await database.ping()  # detects a database that hangs within the default time limit
    async with database.transaction(_TIMEOUT) as connection:
        await connection.execute(f"SET LOCAL statement_timeout = {_TIMEOUT * 1000}")

        async def execute(statement: str) -> list[Any]:
            cursor = await connection.execute(statement.encode())
            return await cursor.fetchall() if cursor.description else []

        return await apply_async(
            execute, all_migrations(), record="headgate_petition_migrations", must_write=True
        )
