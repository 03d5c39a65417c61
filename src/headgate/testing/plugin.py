"""Fixtures for pytest: an application's limits on a test clock, and real servers, started once per run.

They are installed with Headgate; nothing has to be imported.

Environment variables name existing servers to use instead: `HEADGATE_TEST_REDIS_URL`, `HEADGATE_TEST_VALKEY_URL`,
`HEADGATE_TEST_POSTGRES_URL`. If a server is neither installed nor configured, the test fails and is not skipped.
`HEADGATE_TEST_POSTGRES_VERSION=16` starts the older PostgreSQL of the wheel instead of the newer one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from headgate.http.testing import FreshLimits
    from headgate.testing.servers import Kind


@pytest.fixture
def headgate_limits() -> Iterator[FreshLimits]:
    """Make every limit of an application count from zero, in memory, on a stopped clock; `.advance(60)` moves it."""
    # Imported here, because every pytest run with Headgate installed loads this plugin.
    from headgate.testing.frozen import frozen_limits

    with frozen_limits() as limits:
        yield limits


@pytest.fixture(scope="session")
def headgate_redis_url() -> Iterator[str]:
    """Provide the URL of a Redis server that runs until the end of the test run."""
    yield from _url_of("redis")


@pytest.fixture(scope="session")
def headgate_valkey_url() -> Iterator[str]:
    """Provide the URL of a Valkey server that runs until the end of the test run."""
    yield from _url_of("valkey")


@pytest.fixture(scope="session")
def headgate_postgres_server() -> Iterator[str]:
    """Provide the URL of a PostgreSQL server that runs until the end of the test run; its role may create databases."""
    given = os.environ.get("HEADGATE_TEST_POSTGRES_URL")
    if given:
        yield given
        return
    from headgate.testing.postgres_server import NEWEST, PostgresServer

    version = int(os.environ.get("HEADGATE_TEST_POSTGRES_VERSION") or NEWEST)
    with PostgresServer(version) as server:
        yield server.url


@pytest.fixture(scope="session")
def headgate_postgres_url(headgate_postgres_server: str) -> Iterator[str]:
    """Provide the URL of a PostgreSQL database for this run, migrated with `headgate migrate`."""
    from headgate.stores.postgres import migrate
    from headgate.testing.postgres_server import new_database

    with new_database(headgate_postgres_server) as url:
        migrate(url)
        yield url


def _url_of(kind: Kind) -> Iterator[str]:
    given = os.environ.get(f"HEADGATE_TEST_{kind.upper()}_URL")
    if given:
        yield given
        return
    # Imported here, because every pytest run with Headgate installed loads this plugin, and few of them need a server.
    from headgate.testing.servers import RedisServer

    with RedisServer(kind) as server:
        yield server.url
