"""Stores for the tests of the hold book: how to open one, once more after a restart, and how to let its notes expire."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import psycopg
import redis

from headgate import MemoryStore, SQLiteStore
from headgate.stores.base import AsyncNotes, AsyncStore
from headgate.stores.postgres import PostgresStore
from headgate.stores.redis import RedisStore
from headgate.testing import FakeClock

PATIENT = 30.0
"""Seconds: on a busy machine a call may take long, and that is not what these tests are about."""


class NotingStore(AsyncStore, AsyncNotes, Protocol):
    """A store that keeps notes."""


OpenStore = Callable[[], NotingStore]


class Place:
    """Where a test counts, under a namespace of its own."""

    is_shared = True

    def __init__(self) -> None:
        self.namespace = f"n{secrets.token_hex(8)}"

    def open(self) -> NotingStore:
        """Return a store; all of a test's count together."""
        raise NotImplementedError

    def let_notes_expire(self) -> None:
        """Let so much time pass that no note is left; counts may have gone too."""
        raise NotImplementedError


class InMemory(Place):
    is_shared = False

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self._store = MemoryStore(clock=self.clock)

    def open(self) -> NotingStore:
        return self._store

    def let_notes_expire(self) -> None:
        self.clock.advance(1000 * 24 * 3600)


class InFile(Place):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.clock = FakeClock()
        self._path = folder / "limits.db"

    def open(self) -> NotingStore:
        return SQLiteStore(self._path, namespace=self.namespace, clock=self.clock)

    def let_notes_expire(self) -> None:
        self.clock.advance(1000 * 24 * 3600)


class OnRedis(Place):
    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    def open(self) -> NotingStore:
        return RedisStore(self._url, namespace=self.namespace, deadline=PATIENT)

    def let_notes_expire(self) -> None:
        with redis.Redis.from_url(self._url) as client:
            for key in client.scan_iter(f"*{self.namespace}note:*"):
                client.pexpire(key, 0)


class InPostgres(Place):
    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    def open(self) -> NotingStore:
        return PostgresStore(self._url, namespace=self.namespace, deadline=PATIENT)

    def let_notes_expire(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute(
                "UPDATE headgate_notes SET expires = 0 WHERE encode(key, 'escape') LIKE %s",
                (f"%{self.namespace}%",),
            )
