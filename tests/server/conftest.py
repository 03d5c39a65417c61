"""Fixtures of the tests that hold on every store that keeps notes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headgate import MemoryStore
from headgate.stores.postgres import PostgresStore
from headgate.stores.redis import RedisStore
from headgate.testing import FakeClock
from tests.server.hold_places import (
    NotingStore,
    OpenStore,
    Place,
    file_place,
    memory_place,
    network_place,
)


@pytest.fixture(params=["memory", "sqlite", "redis", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Each of the stores."""
    kind: str = request.param
    if kind == "memory":
        return memory_place()
    if kind == "sqlite":
        return file_place(tmp_path)
    url: str = request.getfixturevalue(f"headgate_{kind}_url")
    return network_place(PostgresStore if kind == "postgres" else RedisStore, url)


@pytest.fixture
def store() -> MemoryStore:
    """A memory store, for behaviour that does not depend on the store."""
    return MemoryStore(clock=FakeClock())


@pytest.fixture
async def open_store(place: Place) -> AsyncIterator[OpenStore]:
    """Open stores that count together, and close them in the end."""
    opened: list[NotingStore] = []

    def open_one() -> NotingStore:
        opened.append(place.open())
        return opened[-1]

    yield open_one
    for store in opened:
        await store.aclose()
