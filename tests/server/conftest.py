"""Fixtures of the tests that hold on every store that keeps notes."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from headgate import MemoryStore, SQLiteStore
from headgate.stores.postgres import PostgresStore
from headgate.stores.redis import RedisStore
from headgate.testing import FakeClock
from tests.server.hold_places import PATIENT, NotingStore, OpenStore


@pytest.fixture(params=["memory", "sqlite", "redis", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
    """Each kind of store."""
    kind: str = request.param
    if kind == "memory":
        store = MemoryStore(clock=FakeClock())
        return lambda: store
    if kind == "sqlite":
        return partial(SQLiteStore, tmp_path / "limits.db", clock=FakeClock())
    url: str = request.getfixturevalue(f"headgate_{kind}_url")
    network = PostgresStore if kind == "postgres" else RedisStore
    return partial(network, url, namespace=f"n{secrets.token_hex(8)}", deadline=PATIENT)


@pytest.fixture
def store() -> MemoryStore:
    """A memory store, for behaviour that does not depend on the store."""
    return MemoryStore(clock=FakeClock())


@pytest.fixture
async def open_store(place: OpenStore) -> AsyncIterator[OpenStore]:
    """Open stores that count together, and close them in the end."""
    opened: list[NotingStore] = []

    def open_one() -> NotingStore:
        opened.append(place())
        return opened[-1]

    yield open_one
    for store in opened:
        await store.aclose()
