"""Shared stores with queues of waiting calls, looked at from several processes."""

from __future__ import annotations

import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg
import pytest
import redis

from headgate import AsyncLimiter, Limiter, Rule, SQLiteStore, concurrent
from headgate._async import waiting as async_waiting
from headgate._sync import waiting
from headgate.stores import queues as stores_queues
from headgate.stores.postgres import PostgresStore
from headgate.stores.redis import RedisStore
from tests.integration.waiting import until

ONE_PLACE = concurrent(1, lease="1h", name="place")

PATIENCE = 60
LONGER = 4 * PATIENCE
"""The time-out of waiters: after it they would try again, without having been woken."""
HOURS = 9999.0
SOON = 0.02


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


def set_pauses(patches: pytest.MonkeyPatch, seconds: float) -> None:
    """Make waiters that are not woken call their store after `seconds`."""
    for module in (stores_queues, waiting, async_waiting):
        patches.setattr(module, "RENEW_EVERY", seconds)
    patches.setattr(stores_queues, "POLL_EVERY", seconds)


def queue_of(limiter: Limiter | AsyncLimiter, key: str | bytes = "ada") -> Any:
    """Return the name of the queue of a key."""
    return limiter._queues.of_key((key,))


def place_of(limiter: Limiter | AsyncLimiter, key: str | bytes = "ada") -> Any:
    """Return the name of the queue of a place."""
    return limiter._queues.of_places((key,))["place"]


def until_queued(world: World, queue: bytes, length: int) -> None:
    """Wait until a queue has that many tickets."""
    until(lambda: len(world.tickets(queue)) == length)


def until_asleep(world: World, limiter: Limiter | AsyncLimiter, key: str | bytes = "ada") -> None:
    """Wait until the first waiter for a key is in the queue of its place, and messages reach it."""
    until_queued(world, place_of(limiter, key), 1)
    (ticket,) = world.tickets(place_of(limiter, key))
    until(lambda: world.listens(ticket[: stores_queues.PROCESS_LENGTH]))


def take_and_release(limiter: Limiter, key: str | bytes = "ada", done: Callable[[], object] = bool) -> None:
    """Wait for a place, call `done` and release the place."""
    with limiter.hold(key, timeout=LONGER):
        done()
