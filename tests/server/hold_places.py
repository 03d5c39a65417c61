"""Stores for the tests of holds: open one, open it again after a restart, and expire its records."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import psycopg
import redis

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


class Place:
    """A store with a separate namespace for one test."""

    is_shared = True

    def __init__(self) -> None:
        self.namespace = f"n{secrets.token_hex(8)}"

    def open(self) -> NotingStore:
        """Return a store; all stores of a test share their counts."""
        raise NotImplementedError

    def expire_notes(self) -> None:
        """Expire all notes, and perhaps counts."""
        raise NotImplementedError


class InMemory(Place):
    is_shared = False

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self._store = MemoryStore(clock=self.clock)

    def open(self) -> NotingStore:
        return self._store

    def expire_notes(self) -> None:
        self.clock.advance(1000 * 24 * 3600)


class InFile(Place):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.clock = FakeClock()
        self._path = folder / "limits.db"

    def open(self) -> NotingStore:
        return SQLiteStore(self._path, namespace=self.namespace, clock=self.clock)

    def expire_notes(self) -> None:
        self.clock.advance(1000 * 24 * 3600)


class OnRedis(Place):
    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    def open(self) -> NotingStore:
        return RedisStore(self._url, namespace=self.namespace, deadline=PATIENT)

    def expire_notes(self) -> None:
        with redis.Redis.from_url(self._url) as client:
            for key in client.scan_iter(f"*{self.namespace}note:*"):
                client.pexpire(key, 0)


class InPostgres(Place):
    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    def open(self) -> NotingStore:
        return PostgresStore(self._url, namespace=self.namespace, deadline=PATIENT)

    def expire_notes(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute(
                "UPDATE headgate_notes SET expires = 0 WHERE encode(key, 'escape') LIKE %s",
                (f"%{self.namespace}%",),
            )


async def take(book: HoldBook, key: Key | None = "alice", cost: Cost = 800, *more: Any) -> str:
    """Take a hold from the limiter `llm`, and return its id."""
    hold_id = (await book.take("llm", key, cost, *more)).hold
    assert hold_id is not None
    return hold_id
