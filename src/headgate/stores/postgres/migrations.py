"""Bringing a database to the schema of this version."""

from __future__ import annotations

from functools import partial
from typing import Any

import psycopg
from psycopg.errors import InsufficientPrivilege, ReadOnlySqlTransaction

from headgate.errors import StoreUnavailable
from headgate.migrations import apply
from headgate.stores.postgres.endpoint import PostgresEndpoint
from headgate.stores.postgres.sql import migrations


def migrate(url: str) -> list[str]:
    """Make or update Headgate's tables and functions, and return what was done, one line per migration.

    Each migration is applied once, however many processes do this at the same time; all of them or none. A process with
    older code may go on meanwhile and afterwards. What belongs to a newer version is left alone.

    Raises:
        StoreUnavailable: The database cannot be reached, or the role may not create tables there.
    """
    endpoint = PostgresEndpoint(url)
    try:
        with psycopg.connect(endpoint.conninfo) as connection:
            missing = apply(partial(_run, connection), migrations(), record="headgate_migrations")
    except (InsufficientPrivilege, ReadOnlySqlTransaction) as error:
        text = " ".join(str(error).split())
        raise StoreUnavailable(
            f"{endpoint.name}: this role may not make Headgate's tables ({text}); run 'headgate migrate' with one that may"
        ) from error
    except psycopg.Error as error:
        raise endpoint.error(error) from error
    return [f"{migration.number:04} {migration.name}" for migration in missing]


def _run(connection: psycopg.Connection, statement: str) -> list[Any]:
    cursor = connection.execute(statement.encode())
    return cursor.fetchall() if cursor.description else []
