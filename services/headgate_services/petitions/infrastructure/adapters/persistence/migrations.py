"""Bringing the database up to date: numbered files, each applied once, in order."""

from __future__ import annotations

from importlib import resources

from headgate_services.petitions.infrastructure.adapters.persistence.database import Database

_PATIENCE = 300  # seconds: another instance may be at it, and tables may be large
_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('petition_migrations', 0))"
_TABLE = """
    CREATE TABLE IF NOT EXISTS petition_migrations (
        name TEXT PRIMARY KEY, applied_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT NOW()
    )
"""


def migration_files() -> dict[str, str]:
    """Return the text of each migration by its file's name, in order."""
    folder = resources.files("headgate_services.petitions").joinpath("migrations")
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return {name: folder.joinpath(name).read_text(encoding="utf-8") for name in names}


async def migrate(database: Database) -> list[str]:
    """Apply what has not been applied yet, and return the names. Instances that start together wait for each other."""
    await database.ping()  # a database that hangs is noticed in the usual time
    async with database.transaction(_PATIENCE) as connection:
        await connection.execute(f"SET LOCAL statement_timeout = {_PATIENCE * 1000}")
        await connection.execute(_LOCK)
        await connection.execute(_TABLE)
        rows = await (await connection.execute("SELECT name FROM petition_migrations")).fetchall()
        applied = {name for (name,) in rows}
        missing = {name: text for name, text in migration_files().items() if name not in applied}
        for name, text in missing.items():
            await connection.execute(text)
            await connection.execute("INSERT INTO petition_migrations (name) VALUES (%s)", [name])
    return list(missing)
