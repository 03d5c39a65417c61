"""Shared stores with queues of waiting calls, looked at from several processes."""

from __future__ import annotations

import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg
import redis

from headgate import AsyncLimiter, Limiter, Rule, SQLiteStore, concurrent
from headgate.stores.postgres import PostgresStore
from headgate.stores.redis import RedisStore

ONE_PLACE = concurrent(1, lease="1h", name="place")


class World(ABC):
    """A shared store.

    Attributes:
        url: Its URL.
        tells_others: Whether a waiter is woken by what happens in another process.
    """

    tells_others = True

    def __init__(self, url: str) -> None:
        self.url = url
        self._stores: list[Any] = []

    @abstractmethod
    def _open(self) -> Any:
        """Return a new store."""

    @abstractmethod
    def tickets(self, queue: bytes) -> list[str]:
        """Return the tickets in a queue."""

    @abstractmethod
    def expire(self, queue: bytes, ticket: str, seconds: float = 1) -> None:
        """Make a ticket expire some time ago."""

    @abstractmethod
    def listens(self, process: str) -> bool:
        """Return whether a process receives messages."""

    def store(self) -> Any:
        """Return a store that stands for a process."""
        self._stores.append(self._open())
        return self._stores[-1]

    def limiter(self, name: str, *rules: str | Rule, store: Any = None) -> Limiter:
        """Return a limiter in the process of a store; of a new one by default."""
        store = store or self.store()
        return Limiter(*(rules or (ONE_PLACE,)), name=name, store=store, on_store_error="raise")

    def async_limiter(self, name: str, *, store: Any = None) -> AsyncLimiter:
        """Like `limiter`, for coroutines."""
        return AsyncLimiter(ONE_PLACE, name=name, store=store or self.store(), on_store_error="raise")

    def process_that_tells(self, store: Any) -> Any:
        """Return a store whose calls wake waiters of another one: a new store, or for SQLite the same."""
        return self.store() if self.tells_others else store

    def close(self) -> None:
        for store in self._stores:
            store.close()


class RedisWorld(World):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._client: Any = redis.Redis.from_url(url)

    def _open(self) -> RedisStore:
        return RedisStore(self.url)

    def tickets(self, queue: bytes) -> list[str]:
        return [ticket.decode() for ticket in self._client.hkeys(b"tickets:" + queue)]

    def expire(self, queue: bytes, ticket: str, seconds: float = 1) -> None:
        _, member = self._client.hget(b"tickets:" + queue, ticket).split(b" ", 1)
        kept = b"%d %b" % ((time.time() - seconds) * 1000, member)
        self._client.hset(b"tickets:" + queue, ticket, kept)

    def listens(self, process: str) -> bool:
        ((_, count),) = self._client.pubsub_numsub(f"headgate:{process}")
        return bool(count)

    def close(self) -> None:
        super().close()
        self._client.close()


class PostgresWorld(World):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._connection: Any = psycopg.connect(url, autocommit=True)

    def _open(self) -> PostgresStore:
        return PostgresStore(self.url)

    def tickets(self, queue: bytes) -> list[str]:
        found = self._connection.execute("SELECT ticket FROM headgate_tickets WHERE queue = %b", (queue,))
        return [ticket for (ticket,) in found]

    def expire(self, queue: bytes, ticket: str, seconds: float = 1) -> None:
        self._connection.execute(
            "UPDATE headgate_tickets SET expires = %s WHERE queue = %b AND ticket = %s",
            (int((time.time() - seconds) * 1_000_000), queue, ticket),
        )

    def listens(self, process: str) -> bool:
        statement = f'LISTEN "headgate_{process}"'
        found = self._connection.execute(
            "SELECT FROM pg_stat_activity WHERE query = %s AND state = 'idle'", (statement,)
        )
        return bool(found.fetchall())

    def close(self) -> None:
        super().close()
        self._connection.close()


class SQLiteWorld(World):
    tells_others = False

    def _open(self) -> SQLiteStore:
        return SQLiteStore.from_url(self.url)

    def tickets(self, queue: bytes) -> list[str]:
        found = self._execute("SELECT ticket FROM headgate_tickets WHERE queue = ?", queue)
        return [ticket for (ticket,) in found]

    def expire(self, queue: bytes, ticket: str, seconds: float = 1) -> None:
        self._execute(
            "UPDATE headgate_tickets SET expires = ? WHERE queue = ? AND ticket = ?",
            int((time.time() - seconds) * 1_000_000),
            queue,
            ticket,
        )

    def listens(self, process: str) -> bool:
        return True  # its waiters are woken without messages

    def _execute(self, statement: str, *arguments: object) -> list[Any]:
        path = self.url.removeprefix("sqlite:///")
        with closing(sqlite3.connect(path, isolation_level=None, timeout=60)) as connection:
            return connection.execute(statement, arguments).fetchall()


WORLDS: dict[str, Callable[[str], World]] = {
    "redis": RedisWorld,
    "postgres": PostgresWorld,
    "sqlite": SQLiteWorld,
}
