"""The key-value store in an SQLite file: persistent, and shared by the processes of one machine."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TypeVar

from headgate.clock import MICROSECONDS
from headgate.stores.sqlite_file import SQLiteFile

T = TypeVar("T")

_PUTS_PER_CLEANING = 64

_CREATE = """
    CREATE TABLE IF NOT EXISTS headgate_kv (
        key TEXT PRIMARY KEY,
        value TEXT NOT NULL,
        expires INTEGER NOT NULL -- microseconds since the epoch
    ) WITHOUT ROWID
"""
_GET = "SELECT value FROM headgate_kv WHERE key = ? AND expires > ?"
_PUT = "INSERT OR REPLACE INTO headgate_kv VALUES (?, ?, ?)"
_DELETE = "DELETE FROM headgate_kv WHERE key = ?"
_DELETE_EXPIRED = "DELETE FROM headgate_kv WHERE expires <= ?"
_KEYS = "SELECT key FROM headgate_kv WHERE substr(key, 1, ?) = ? AND expires > ? ORDER BY key"


class SQLiteKV(SQLiteFile):
    """Keeps values in an SQLite file.

    Args:
        path: The file; created if it does not exist. It must be on a local disk.
        timeout: Seconds to wait for other processes that are writing before `StoreUnavailable` is raised.
        clock: The clock; by default the machine's wall clock, which all its processes share.

    Several processes may use one file, each with a separate adapter; after a fork, the child opens the file again.
    """

    schema = (_CREATE,)
    _puts = 0

    async def get(self, key: str) -> str | None:
        return await self._run(partial(self._get, key), write=False)

    async def put(self, key: str, value: str, ttl: int) -> None:
        await self._run(partial(self._put, key, value, ttl))

    async def swap(self, key: str, expected: str | None, value: str, ttl: int) -> bool:
        return await self._run(partial(self._swap, key, expected, value, ttl))

    async def delete(self, key: str) -> None:
        await self._run(lambda connection: connection.execute(_DELETE, (key,)))

    async def list_keys(self, prefix: str = "") -> AsyncIterator[str]:
        for key in await self._run(partial(self._keys, prefix), write=False):
            yield key

    async def _run(self, work: Callable[[sqlite3.Connection], T], *, write: bool = True) -> T:
        """Run `work` in a transaction, which is completed even if the caller is cancelled."""
        return await self.in_worker(partial(self.transact, work, write=write), completes=True)

    def _get(self, key: str, connection: sqlite3.Connection) -> str | None:
        found = connection.execute(_GET, (key, self.clock.now_us())).fetchone()
        return None if found is None else str(found[0])

    def _put(self, key: str, value: str, ttl: int, connection: sqlite3.Connection) -> None:
        now = self.clock.now_us()
        connection.execute(_PUT, (key, value, now + ttl * MICROSECONDS))
        self._puts += 1
        if self._puts % _PUTS_PER_CLEANING == 0:
            connection.execute(_DELETE_EXPIRED, (now,))

    def _swap(
        self, key: str, expected: str | None, value: str, ttl: int, connection: sqlite3.Connection
    ) -> bool:
        unchanged = self._get(key, connection) == expected
        if unchanged:
            self._put(key, value, ttl, connection)
        return unchanged

    def _keys(self, prefix: str, connection: sqlite3.Connection) -> list[str]:
        rows = connection.execute(_KEYS, (len(prefix), prefix, self.clock.now_us()))
        return [str(key) for (key,) in rows]
