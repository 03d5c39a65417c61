"""Headgate's tables and functions are created once, also by several connections at a time."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from headgate import Limiter, StoreConflict, StoreUnavailable
from headgate.migrations import Migration
from headgate.migrations import apply as apply_migrations
from headgate.stores.postgres import PostgresStore, migrate
from headgate.stores.postgres.sql import migrations


def test_migrations_are_numbered_without_gaps() -> None:
    assert [migration.number for migration in migrations()] == list(range(1, len(migrations()) + 1))


def test_each_migration_is_applied_once_and_reported(empty_url: str) -> None:
    store = PostgresStore(empty_url)
    assert store.migrate() == [f"{migration.number:04} {migration.name}" for migration in migrations()]
    assert store.migrate() == []
    with psycopg.connect(empty_url) as connection:
        get_note = connection.execute(
            "SELECT number, name FROM headgate_migrations ORDER BY number"
        ).fetchall()
    assert get_note == [(migration.number, migration.name) for migration in migrations()]


def test_migrations_at_the_same_time_apply_each_migration_once(empty_url: str) -> None:
    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(migrate, [empty_url] * 12))
    assert max(done, key=len) == [f"{migration.number:04} {migration.name}" for migration in migrations()]
    assert sum(map(len, done)) == len(migrations())


def test_migrations_of_a_newer_version_are_not_changed(empty_url: str) -> None:
    migrate(empty_url)
    with psycopg.connect(empty_url) as connection:
        connection.execute("INSERT INTO headgate_migrations VALUES (9999, 'from the future')")
    assert migrate(empty_url) == []


def test_a_migration_that_fails_leaves_nothing_behind(empty_url: str) -> None:
    with psycopg.connect(empty_url) as connection:
        connection.execute("CREATE TYPE headgate_cell_v2 AS ENUM ()")
    with pytest.raises(StoreConflict, match="headgate_cell_v2"):
        migrate(empty_url)
    with psycopg.connect(empty_url) as connection:
        assert connection.execute("SELECT to_regclass('headgate_states')").fetchone() == (None,)


@contextmanager
def role_on(url: str, *grants: str) -> Iterator[str]:
    """Create a role with the right to connect and the given grants, and return its URL."""
    role = sql.Identifier(f"headgate_{secrets.token_hex(8)}")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'secret'").format(role))
        for grant in grants:
            connection.execute(sql.SQL(grant + " TO {}").format(role))  # type: ignore[arg-type]
        try:
            yield make_conninfo(url, user=role.as_string().strip('"'), password="secret")
        finally:
            connection.execute(sql.SQL("DROP OWNED BY {}").format(role))
            connection.execute(sql.SQL("DROP ROLE {}").format(role))


def test_missing_create_right_error_names_the_command(empty_url: str) -> None:
    with role_on(empty_url) as url, pytest.raises(StoreUnavailable, match="run 'headgate migrate'") as caught:
        migrate(url)
    assert "secret" not in str(caught.value)


def test_role_with_table_rights_only_can_count(empty_url: str) -> None:
    migrate(empty_url)
    grant = "GRANT SELECT, INSERT, UPDATE, DELETE ON headgate_states"
    with role_on(empty_url, grant) as url, PostgresStore(url) as store:
        limiter = Limiter("1/minute", name="x", store=store, on_store_error="raise")
        assert limiter.hit("a")
        assert not limiter.hit("a")
        limiter.reset("a")
        assert limiter.hit("a")


def test_unreachable_database_error_hides_the_password() -> None:
    with pytest.raises(StoreUnavailable, match=r"PostgreSQL at 127\.0\.0\.1:1/limits") as caught:
        migrate("postgresql://user:secret@127.0.0.1:1/limits")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("must_write", [False, True])
def test_read_only_database_is_refused_if_must_write(empty_url: str, must_write: bool) -> None:
    found = [Migration(1, "one", "CREATE TABLE one ()")]

    def run(url: str) -> list[Migration]:
        with psycopg.connect(url) as connection:

            def execute(statement: str) -> list[tuple[object, ...]]:
                cursor = connection.execute(statement.encode())
                return cursor.fetchall() if cursor.description else []

            return apply_migrations(execute, found, "records", must_write=must_write)

    assert run(empty_url) == found
    read_only = make_conninfo(empty_url, options="-c default_transaction_read_only=on")
    if not must_write:
        assert run(read_only) == []
        return
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        run(read_only)
