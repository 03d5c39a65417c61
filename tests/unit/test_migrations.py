"""Numbered SQL files, each applied once and in order."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate.migrations import Migration, MigrationError, apply, apply_async, read_migrations

KNOWN = [
    Migration(1, "create people", "CREATE TABLE people (name TEXT)"),
    Migration(2, "add one", "INSERT INTO people VALUES ('ada')"),
]


@pytest.fixture
def database() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    yield connection
    connection.close()


@pytest.fixture
def execute(database: sqlite3.Connection) -> Callable[[str], list[Any]]:
    return lambda statement: database.execute(statement).fetchall()


def applied(database: sqlite3.Connection) -> list[Any]:
    return database.execute("SELECT number, name FROM done ORDER BY number").fetchall()


def test_missing_migrations_are_applied_once_and_in_order(
    database: sqlite3.Connection, execute: Callable[[str], list[Any]]
) -> None:
    assert apply(execute, KNOWN[:1], "done", "sqlite") == KNOWN[:1]
    assert apply(execute, KNOWN, "done", "sqlite") == KNOWN[1:]
    assert apply(execute, KNOWN, "done", "sqlite") == []
    assert applied(database) == [(1, "create people"), (2, "add one")]
    assert database.execute("SELECT name FROM people").fetchall() == [("ada",)]


async def test_async_migrations_are_applied_once(
    database: sqlite3.Connection, execute: Callable[[str], list[Any]]
) -> None:
    async def run(statement: str) -> list[Any]:
        return execute(statement)

    assert await apply_async(run, KNOWN, "done", "sqlite") == KNOWN
    assert await apply_async(run, KNOWN, "done", "sqlite") == []
    assert len(applied(database)) == 2


def test_newer_database_is_unchanged_or_refused(execute: Callable[[str], list[Any]]) -> None:
    apply(execute, KNOWN, "done", "sqlite")
    assert apply(execute, KNOWN[:1], "done", "sqlite") == []
    with pytest.raises(MigrationError, match="migration 2, which a newer version"):
        apply(execute, KNOWN[:1], "done", "sqlite", refuse_newer=True)


def test_on_postgresql_processes_wait_for_each_other() -> None:
    said: list[str] = []

    def execute(statement: str) -> list[Any]:
        said.append(statement)
        return [(True,)] if "to_regclass" in statement else []

    assert apply(execute, KNOWN[:1], "done") == KNOWN[:1]
    assert said[0] == "SELECT pg_advisory_xact_lock(hashtextextended('done', 0))"


def test_migration_files_are_read_in_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("0002_add_one.sql", "0001_create_people.sql", "README.md", "1_no.sql"):
        (tmp_path / name).write_text(name)
    assert read_migrations(tmp_path) == [
        Migration(1, "create people", "0001_create_people.sql"),
        Migration(2, "add one", "0002_add_one.sql"),
    ]
