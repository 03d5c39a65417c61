"""Fixtures for pytest: limits of applications on a clock of the test's, and real servers, started once per run.

They come with Headgate; nothing has to be imported.

Environment variables name servers to use instead: `HEADGATE_TEST_REDIS_URL`, `HEADGATE_TEST_VALKEY_URL`,
`HEADGATE_TEST_POSTGRES_URL`. A server that is neither installed nor named is a failure, never a skip.
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
    """Let every limit of an application count from zero, in memory, while time stands still; `.advance(60)` moves it."""
    # Imported here: all who have Headgate installed load this plugin.
    from headgate.testing.frozen import frozen_limits

    with frozen_limits() as limits:
        yield limits


@pytest.fixture(scope="session")
def headgate_redis_url() -> Iterator[str]:
    """Provide the URL of a Redis server that lives as long as the run."""
    yield from _url_of("redis")


@pytest.fixture(scope="session")
def headgate_valkey_url() -> Iterator[str]:
    """Provide the URL of a Valkey server that lives as long as the run."""
    yield from _url_of("valkey")


@pytest.fixture(scope="session")
def headgate_postgres_server() -> Iterator[str]:
    """Provide the URL of a PostgreSQL server that lives as long as the run, with a role that may create databases."""
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
    """Provide the URL of a PostgreSQL database of this run's own, in which `headgate migrate` has been run."""
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
    # Imported here: every pytest run with Headgate installed loads this plugin, and few of them need a server.
    from headgate.testing.servers import RedisServer

    with RedisServer(kind) as server:
        yield server.url
