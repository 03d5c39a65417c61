"""The PostgreSQL store keeps every promise, on the oldest and the newest server that the wheel carries."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import psycopg
import pytest

from headgate.stores.postgres import PostgresStore, migrate
from headgate.testing import StoreContract
from headgate.testing.postgres_server import OLDEST, PostgresServer

PATIENT = 60.0
"""Seconds. On a busy machine a call may take long, and the policy for that is another test's business."""


@pytest.fixture(scope="module")
def oldest_postgres_url() -> Iterator[str]:
    with PostgresServer(OLDEST) as server:
        migrate(server.url)
        yield server.url


class PostgresContract(StoreContract):
    effort = 0.25
    prepare = True
    durable = False

    @pytest.fixture(autouse=True)
    def _database(self, headgate_postgres_url: str) -> None:
        self.url = headgate_postgres_url
        self.namespace = secrets.token_hex(8)

    def make_store(self) -> PostgresStore:
        return PostgresStore(
            self.url,
            namespace=self.namespace,
            deadline=PATIENT,
            prepare=self.prepare,
            durable=self.durable,
            clock=self.clock if self.own_time else None,
        )

    def dump(self) -> object:
        with psycopg.connect(self.url) as connection:
            mark = f"%{self.namespace}%"
            query = "SELECT key, state FROM headgate_states WHERE encode(key, 'escape') LIKE %s ORDER BY key"
            return connection.execute(query, (mark,)).fetchall()


class TestPostgresAtGivenTimes(PostgresContract):
    """Prepared statements, asynchronous commit: as by default."""


class TestOldestPostgresByItsOwnClock(PostgresContract):
    """Statements that any pooler passes on, and commits that wait for the disk."""

    effort = 0.1
    own_time = True
    prepare = False
    durable = True

    @pytest.fixture(autouse=True)
    def _database(self, oldest_postgres_url: str) -> None:
        self.url = oldest_postgres_url
        self.namespace = secrets.token_hex(8)
