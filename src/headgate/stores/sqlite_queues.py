"""Queues of waiting calls in an SQLite file; see `headgate.stores.queues`.

Each step is one write transaction. A waiter of this process that becomes first is woken at once. Waiters of other
processes are not woken, and poll.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from headgate.algorithms.waiting import next_tag
from headgate.clock import Clock, to_microseconds
from headgate.errors import StoreError
from headgate.stores.queues import KeyParts, QueueNames, WakeUps
from headgate.stores.sqlite_file import SQLiteFile, look_after

T = TypeVar("T")

SCHEMA = (
    """
    CREATE TABLE IF NOT EXISTS headgate_tickets (
        queue BLOB,
        ticket TEXT,
        priority INTEGER NOT NULL,
        tag INTEGER NOT NULL,     -- the lowest one is first; among equal tags the higher priority
        expires INTEGER NOT NULL, -- microseconds since the epoch, by the store's clock
        PRIMARY KEY (queue, ticket)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX IF NOT EXISTS headgate_tickets_order ON headgate_tickets (queue, tag, priority DESC)",
    "CREATE INDEX IF NOT EXISTS headgate_tickets_priority ON headgate_tickets (queue, priority, tag)",
    "CREATE INDEX IF NOT EXISTS headgate_tickets_expires ON headgate_tickets (expires)",
)

_FIRST = """
    SELECT ticket, tag, expires FROM headgate_tickets WHERE queue = ? ORDER BY tag, priority DESC LIMIT 1
"""
_LAST = "SELECT coalesce(max(tag), 0) FROM headgate_tickets WHERE queue = ? AND priority = ?"
_INSERT = "INSERT INTO headgate_tickets VALUES (?, ?, ?, ?, ?)"
_RENEW = "UPDATE headgate_tickets SET expires = ? WHERE queue = ? AND ticket = ?"
_DELETE = "DELETE FROM headgate_tickets WHERE queue = ? AND ticket = ?"
_CLEAN = """
    DELETE FROM headgate_tickets WHERE (queue, ticket) IN (
        SELECT queue, ticket FROM headgate_tickets WHERE expires <= ? ORDER BY expires LIMIT ?
    )
"""

TICKETS_PER_CLEANING = 2
"""Tickets of dead queues that a new ticket removes."""

DEAD_AFTER_US = 60_000_000
"""Time after its expiry at which a ticket is in a dead queue: queues in use remove theirs earlier."""


class Tickets:
    """The tickets in a file.

    Args:
        clock: The store's clock.

    Attributes:
        wake_ups: The waiters of this process.
    """

    def __init__(self, clock: Clock) -> None:
        self.wake_ups = WakeUps()
        self._clock = clock

    def enter(
        self, queue: bytes, ticket: str, priority: int, lasting_us: int, connection: sqlite3.Connection
    ) -> bool:
        """Enter a queue, or stay in it; return whether the ticket is first."""
        now = self._clock.now_us()
        is_member = connection.execute(_RENEW, (now + lasting_us, queue, ticket)).rowcount > 0
        first, tag, has_changed = _first(connection, queue, now)
        if not is_member:
            ((last,),) = connection.execute(_LAST, (queue, priority))
            new = next_tag(tag, last, priority)
            connection.execute(_INSERT, (queue, ticket, priority, new, now + lasting_us))
            connection.execute(_CLEAN, (now - DEAD_AFTER_US, TICKETS_PER_CLEANING))
            first = first or ticket
        if has_changed and first != ticket:
            self._wake(first)
        return first == ticket

    def leave(self, queue: bytes, ticket: str, connection: sqlite3.Connection) -> None:
        """Leave a queue."""
        now = self._clock.now_us()
        first, _, has_changed = _first(connection, queue, now)
        connection.execute(_DELETE, (queue, ticket))
        if first == ticket:
            (first, _, _), has_changed = _first(connection, queue, now), True
        if has_changed:
            self._wake(first)

    def wake_first(self, place: bytes, connection: sqlite3.Connection) -> None:
        """Wake the first waiter for a place that was released."""
        self._wake(_first(connection, place, self._clock.now_us())[0])

    def _wake(self, ticket: str | None) -> None:
        # Before the end of the transaction: the waiter needs the lock of the file to go on.
        if ticket is not None:
            self.wake_ups.wake(ticket)


def _first(connection: sqlite3.Connection, queue: bytes, now: int) -> tuple[str | None, int, bool]:
    """Remove expired tickets from the front; return the first ticket, its tag, and whether any was removed."""
    has_changed = False
    while True:
        ticket, tag, expires = connection.execute(_FIRST, (queue,)).fetchone() or (None, 0, 0)
        if ticket is None or expires > now:
            return ticket, tag, has_changed
        connection.execute(_DELETE, (queue, ticket))
        has_changed = True


class _SQLiteQueueMethods:
    """See `QueueMethods`.

    Args:
        file: The file.
        names: The names of the queues.
        tickets: The tickets in the file.
    """

    is_remote = False

    def __init__(self, file: SQLiteFile, names: QueueNames, tickets: Tickets) -> None:
        self.of_key = names.of_key
        self.of_places = names.of_places
        self.new_ticket = tickets.wake_ups.new_ticket
        self._file = file
        self._tickets = tickets

    def leave(self, queue: bytes, ticket: str) -> None:
        leave = self._transaction(partial(self._tickets.leave, queue, ticket))
        with suppress(StoreError):  # the ticket expires
            self._file.start_in_worker(leave).add_done_callback(partial(look_after, None))

    def released(self, parts: KeyParts) -> None:
        """Do nothing: the gate wakes the waiter of a place."""

    def pause(self, queue: bytes, *, is_place: bool = False) -> float:
        return self._tickets.wake_ups.pause()

    def missed(self) -> None:
        """Do nothing: the next check is always soon."""

    def _entry(self, queue: bytes, ticket: str, priority: int) -> Callable[[], bool]:
        lasting_us = to_microseconds(self._tickets.wake_ups.lifetime())
        return self._transaction(partial(self._tickets.enter, queue, ticket, priority, lasting_us))

    def _transaction(self, work: Callable[[sqlite3.Connection], T]) -> Callable[[], T]:
        return partial(self._file.transact, work, write=True)


class SQLiteQueues(_SQLiteQueueMethods):
    """See `Queues`."""

    def enter(self, queue: bytes, ticket: str, priority: int) -> bool:
        return self._entry(queue, ticket, priority)()


class AsyncSQLiteQueues(_SQLiteQueueMethods):
    """See `AsyncQueues`."""

    async def enter(self, queue: bytes, ticket: str, priority: int) -> bool:
        return await self._file.in_worker(self._entry(queue, ticket, priority))
