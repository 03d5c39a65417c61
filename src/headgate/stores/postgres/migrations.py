"""Bringing a database to the schema of this version."""

from __future__ import annotations

import psycopg
from psycopg.errors import InsufficientPrivilege, ReadOnlySqlTransaction

from headgate.errors import StoreUnavailable
from headgate.stores.postgres.endpoint import Endpoint
from headgate.stores.postgres.sql import Migration, migrations, query


def migrate(url: str) -> list[str]:
    """Make or update Headgate's tables and functions, and return what was done, one line per migration.

    Each migration is applied once, however many processes do this at the same time; all of them or none. A process with
    older code may go on meanwhile and afterwards. What belongs to a newer version is left alone.

    Raises:
        StoreUnavailable: The database cannot be reached, or the role may not create tables there.
    """
    endpoint = Endpoint(url)
    try:
        with psycopg.connect(endpoint.conninfo) as connection:
            return _apply(connection, migrations())
    except (InsufficientPrivilege, ReadOnlySqlTransaction) as error:
        text = " ".join(str(error).split())
        raise StoreUnavailable(
            f"{endpoint.name}: this role may not make Headgate's tables ({text}); run 'headgate migrate' with one that may"
        ) from error
    except psycopg.Error as error:
        raise endpoint.error(error) from error


def _apply(connection: psycopg.Connection, known: list[Migration]) -> list[str]:
    """Apply what is missing, in one transaction."""
    connection.execute(query("lock_migrations"))
    (any_applied,) = connection.execute(query("migrations_table")).fetchone() or (False,)
    applied = set()
    if any_applied:
        applied = {number for (number,) in connection.execute(query("applied_migrations"))}
    missing = [migration for migration in known if migration.number not in applied]
    for migration in missing:
        connection.execute(migration.text.encode())
        connection.execute(query("note_migration"), (migration.number, migration.name))
    return [f"{migration.number:04} {migration.name}" for migration in missing]
