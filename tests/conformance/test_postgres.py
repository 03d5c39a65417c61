"""The PostgreSQL store keeps every promise."""

from __future__ import annotations

import secrets

import psycopg
import pytest

from headgate.stores.postgres import PostgresStore
from headgate.testing import StoreContract
from headgate.testing.contract.base import Contract
from tests.conformance.variants import BlockingVariant

PATIENT = 60.0
"""Seconds. A call on a busy machine may be slow; other tests cover timeouts."""


class PostgresContract(Contract):
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


class TestPostgresAtGivenTimes(PostgresContract, StoreContract):
    """Prepared statements and asynchronous commit, the defaults."""


class TestPostgresByItsOwnClock(PostgresContract, BlockingVariant):
    """Statements that work with any pooler, and synchronous commits."""

    effort = 0.1
    own_time = True
    prepare = False
    durable = True
