"""Stores for the tests of holds: each kind that keeps notes, with a separate namespace for one test."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from headgate import MemoryStore, SQLiteStore
from headgate.costs import Cost
from headgate.keys import Key
from headgate.stores.base import AsyncNotes, AsyncStore
from headgate.stores.postgres import PostgresStore
from headgate.stores.redis import RedisStore
from headgate.testing import FakeClock
from headgate_server.holds import HoldBook

PATIENT = 30.0
"""Deadline in seconds, for a busy machine."""


class NotingStore(AsyncStore, AsyncNotes, Protocol):
    """A store that keeps notes."""


OpenStore = Callable[[], NotingStore]


@dataclass
class Place:
    """Where the stores of a test count together.

    Attributes:
        open: Opens a store.
        is_shared: Whether other processes can open it.
    """

    open: OpenStore
    is_shared: bool = True


def memory_place() -> Place:
    store = MemoryStore(clock=FakeClock())
    return Place(lambda: store, is_shared=False)


def file_place(folder: Path) -> Place:
    return Place(partial(SQLiteStore, folder / "limits.db", clock=FakeClock()))


def network_place(kind: type[RedisStore | PostgresStore], url: str) -> Place:
    return Place(partial(kind, url, namespace=f"n{secrets.token_hex(8)}", deadline=PATIENT))


async def take(book: HoldBook, key: Key | None = "alice", cost: Cost = 800, *more: Any) -> str:
    """Take a hold from the limiter `llm`, and return its id."""
    hold_id = (await book.take("llm", key, cost, *more)).hold
    assert hold_id is not None
    return hold_id
