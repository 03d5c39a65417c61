"""What the tests of the petition service share: a real PostgreSQL, and services on it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from headgate.testing.postgres_server import new_database
from headgate_services.petitions.infrastructure.adapters.persistence import (
    Database,
    PostgresRateLimitStore,
    migrate,
)
from tests.apps.petitions.support import Calendar, Service, is_setting, opened, running

Start = Callable[..., Awaitable[Service]]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(filter(is_setting, os.environ)):
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def shared_url(headgate_postgres_server: str) -> Iterator[str]:
    """Provide a migrated database that tests share; each is to submit as somebody of its own."""
    with new_database(headgate_postgres_server) as url:
        asyncio.run(_migrate(url))
        yield url


@pytest.fixture
def empty_url(headgate_postgres_server: str) -> Iterator[str]:
    """Provide an empty database of the test's own."""
    with new_database(headgate_postgres_server) as url:
        yield url


@pytest.fixture
def calendar() -> Calendar:
    """Provide a calendar to turn."""
    return Calendar()


@pytest.fixture
async def database(shared_url: str) -> AsyncIterator[Database]:
    """Provide the shared database as the service sees it."""
    async with opened(shared_url) as database:
        yield database


@pytest.fixture
async def own_database(empty_url: str) -> AsyncIterator[Database]:
    """Provide a migrated database of the test's own, whose global counter nobody else adds to."""
    async with opened(empty_url) as database:
        await migrate(database)
        yield database


@pytest.fixture
def store(database: Database, calendar: Calendar) -> PostgresRateLimitStore:
    """Provide the counters of the shared database, in the calendar's time."""
    return PostgresRateLimitStore(database, now=calendar)


@pytest.fixture
async def start(shared_url: str, calendar: Calendar) -> AsyncIterator[Start]:
    """Provide a function that starts a service in this process; all are stopped in the end."""
    async with AsyncExitStack() as stack:

        async def start_service(**options: Any) -> Service:
            url = options.pop("url", shared_url)
            options.setdefault("calendar", calendar)
            return await stack.enter_async_context(running(url, **options))

        yield start_service


async def _migrate(url: str) -> None:
    async with opened(url) as database:
        await migrate(database)
