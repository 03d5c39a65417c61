"""The PostgreSQL store keeps its promises to coroutines, whose calls are sent together."""

from __future__ import annotations

import secrets

import pytest

from headgate.stores.postgres import PostgresStore
from tests.conformance.test_postgres import PATIENT
from tests.conformance.variants import TaskVariant


class TestAsyncPostgres(TaskVariant):
    effort = 0.2

    @pytest.fixture(autouse=True)
    def _database(self, headgate_postgres_url: str) -> None:
        self.url = headgate_postgres_url
        self.namespace = secrets.token_hex(8)

    def make_store(self) -> PostgresStore:
        return PostgresStore(self.url, namespace=self.namespace, deadline=PATIENT)
