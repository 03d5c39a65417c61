"""Migration of a database to the schema of this version."""

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
    """Create or update Headgate's tables and functions, and return one line per applied migration.

    Each migration is applied once, even if several processes migrate at the same time; all of them or none. Processes with
    older code may run during and after a migration. Objects of newer versions are not changed.

    Raises:
        StoreUnavailable: The database cannot be reached, or the role may not create tables.
    """
    endpoint = PostgresEndpoint(url)
    try:
        with psycopg.connect(endpoint.conninfo) as connection:
            missing = apply(partial(_run, connection), migrations(), record="headgate_migrations")
    except (InsufficientPrivilege, ReadOnlySqlTransaction) as error:
        text = " ".join(str(error).split())
        raise StoreUnavailable(
            f"{endpoint.name}: this role may not create Headgate's tables ({text}); run 'headgate migrate' with another role"
        ) from error
    except psycopg.Error as error:
        raise endpoint.error(error) from error
    return [f"{migration.number:04} {migration.name}" for migration in missing]


def _run(connection: psycopg.Connection, statement: str) -> list[Any]:
    cursor = connection.execute(statement.encode())
    return cursor.fetchall() if cursor.description else []
