"""Numbered SQL files for SQLite and PostgreSQL."""

from __future__ import annotations

from importlib import resources

from headgate.migrations import Migration, read_migrations


def all_migrations() -> list[Migration]:
    """Return the migrations, in order."""
    return read_migrations(resources.files(__name__))
