"""Databases for these tests: a shared one, and servers that a test may break."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from headgate.stores.postgres import migrate
from headgate.stores.postgres.peer import PostgresWire, Statement
from headgate.stores.remote.peer import PENDING
from headgate.testing.postgres_server import PostgresServer, new_database


@pytest.fixture(scope="session")
def url(headgate_postgres_url: str) -> str:
    """A migrated database that all tests share; each test uses a unique name."""
    return headgate_postgres_url


@pytest.fixture
def empty_url(headgate_postgres_server: str) -> Iterator[str]:
    """An empty database for one test."""
    with new_database(headgate_postgres_server) as url:
        yield url


@pytest.fixture
def connection(url: str) -> Iterator[psycopg.Connection]:
    """A plain connection, to inspect the tables."""
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


@pytest.fixture(scope="session")
def breakable() -> Iterator[PostgresServer]:
    """A migrated server for tests that break it."""
    with PostgresServer() as server:
        migrate(server.url)
        yield server


@pytest.fixture
def server(breakable: PostgresServer) -> Iterator[PostgresServer]:
    """A server that the test may leave broken."""
    breakable.start()
    yield breakable
    breakable.resume()


def execute(wire: PostgresWire, statement: bytes) -> None:
    """Execute a statement in a session of a store."""
    wire.send((Statement(b"", statement, [], is_frequent=False), []))
    while wire.receive() is PENDING:
        wire.wait(60)
