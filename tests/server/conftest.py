"""Fixtures of the tests that hold on every store that keeps notes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.server.hold_places import InFile, InMemory, InPostgres, NotingStore, OnRedis, OpenStore, Place


@pytest.fixture(params=["memory", "sqlite", "redis", "valkey", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Each of the stores."""
    kind: str = request.param
    if kind == "memory":
        return InMemory()
    if kind == "sqlite":
        return InFile(tmp_path)
    url: str = request.getfixturevalue(f"headgate_{kind}_url")
    return InPostgres(url) if kind == "postgres" else OnRedis(url)


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
