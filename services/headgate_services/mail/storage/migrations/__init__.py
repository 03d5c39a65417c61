"""The tables, as numbered SQL files that SQLite and PostgreSQL both understand."""

from __future__ import annotations

from importlib import resources

from headgate.migrations import Migration, read_migrations


def all_migrations() -> list[Migration]:
    """Return the migrations, in order."""
    return read_migrations(resources.files(__name__))
