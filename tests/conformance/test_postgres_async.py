"""The PostgreSQL store keeps every promise to coroutines, whose calls are sent together."""

from __future__ import annotations

import secrets

import pytest

from headgate.stores.postgres import PostgresStore
from headgate.testing import AsyncStoreContract
from tests.conformance.test_postgres import PATIENT


class TestAsyncPostgres(AsyncStoreContract):
    effort = 0.2

    @pytest.fixture(autouse=True)
    def _database(self, headgate_postgres_url: str) -> None:
        self.url = headgate_postgres_url
        self.namespace = secrets.token_hex(8)

    def make_store(self) -> PostgresStore:
        return PostgresStore(self.url, namespace=self.namespace, deadline=PATIENT)
