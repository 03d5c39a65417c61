"""Fixtures of the petitions service: a real PostgreSQL, and services on it."""

from __future__ import annotations

import asyncio
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
from tests.apps.petitions.support import Calendar, Service, opened, running

Start = Callable[..., Awaitable[Service]]


@pytest.fixture(scope="session")
def shared_url(headgate_postgres_server: str) -> Iterator[str]:
    """A migrated database that tests share; each test uses its own submitters."""
    with new_database(headgate_postgres_server) as url:
        asyncio.run(_migrate(url))
        yield url


@pytest.fixture
def calendar() -> Calendar:
    return Calendar()


@pytest.fixture
async def database(shared_url: str) -> AsyncIterator[Database]:
    async with opened(shared_url) as database:
        yield database


@pytest.fixture
async def own_database(empty_url: str) -> AsyncIterator[Database]:
    """A migrated database that no other test uses."""
    async with opened(empty_url) as database:
        await migrate(database)
        yield database


@pytest.fixture
def store(database: Database, calendar: Calendar) -> PostgresRateLimitStore:
    return PostgresRateLimitStore(database, now=calendar)


@pytest.fixture
async def start(shared_url: str, calendar: Calendar) -> AsyncIterator[Start]:
    """A function that starts a service in this process."""
    async with AsyncExitStack() as stack:

        async def start_service(**options: Any) -> Service:
            url = options.pop("url", shared_url)
            options.setdefault("calendar", calendar)
            return await stack.enter_async_context(running(url, **options))

        yield start_service


async def _migrate(url: str) -> None:
    async with opened(url) as database:
        await migrate(database)
