"""The key-value store in an SQLite file: there after a restart, and shared by the processes of one machine."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar
from urllib.parse import unquote

from headgate.clock import MICROSECONDS, Clock, WallClock
from headgate.errors import ConfigError, StoreUnavailable
from headgate.stores.base import Guarantees
from headgate.stores.sqlite import switch_to_wal

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


class SQLiteKV:
    """Keeps values in an SQLite file.

    Args:
        path: The file; made if it does not exist. It belongs on a local disk.
        timeout: Seconds to wait for other processes that are writing before `StoreUnavailable` is raised.
        clock: Where time comes from; by default the machine's wall clock, which all its processes share.

    Several processes may use one file, each with an adapter of its own; one made before a fork opens the file anew.
    """

    guarantees = Guarantees(
        shared=True,
        durable=True,
        may_lose="nothing when a process dies; the last moments when the machine does (WAL, synchronous=NORMAL)",
    )

    def __init__(
        self, path: str | os.PathLike[str], *, timeout: float = 5.0, clock: Clock | None = None
    ) -> None:
        self.path = os.fspath(path)
        self.timeout = timeout
        self._clock: Clock = WallClock() if clock is None else clock
        self._puts = 0
        self._closed = False
        self._start()

    @classmethod
    def from_url(cls, url: str) -> SQLiteKV:
        """Return the store of `sqlite:///relative/path.db` or `sqlite:////absolute/path.db`."""
        scheme, separator, path = url.partition(":///")
        if scheme.lower() != "sqlite" or not separator or not path:
            raise ConfigError(f"{url!r}: write 'sqlite:///relative/path.db' or 'sqlite:////absolute/path.db'")
        return cls(unquote(path))

    async def get(self, key: str) -> str | None:
        return await self._run(partial(self._get, key))

    async def put(self, key: str, value: str, ttl: int) -> None:
        await self._run(partial(self._put, key, value, ttl))

    async def swap(self, key: str, expected: str | None, value: str, ttl: int) -> bool:
        return await self._run(partial(self._swap, key, expected, value, ttl))

    async def delete(self, key: str) -> None:
        await self._run(lambda: self._connection.execute(_DELETE, (key,)))

    async def list_keys(self, prefix: str = "") -> AsyncIterator[str]:
        for key in await self._run(partial(self._keys, prefix)):
            yield key

    async def aclose(self) -> None:
        """Close the file."""
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._stop)

    # --- In the worker thread ---

    def _get(self, key: str) -> str | None:
        found = self._connection.execute(_GET, (key, self._clock.now_us())).fetchone()
        return None if found is None else str(found[0])

    def _put(self, key: str, value: str, ttl: int) -> None:
        now = self._clock.now_us()
        self._connection.execute(_PUT, (key, value, now + ttl * MICROSECONDS))
        self._puts += 1
        if self._puts % _PUTS_PER_CLEANING == 0:
            self._connection.execute(_DELETE_EXPIRED, (now,))

    def _swap(self, key: str, expected: str | None, value: str, ttl: int) -> bool:
        self._connection.execute("BEGIN IMMEDIATE")  # no other process writes between looking and putting
        try:
            unchanged = self._get(key) == expected
            if unchanged:
                self._put(key, value, ttl)
            self._connection.execute("COMMIT")
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        return unchanged

    def _keys(self, prefix: str) -> list[str]:
        rows = self._connection.execute(_KEYS, (len(prefix), prefix, self._clock.now_us()))
        return [str(key) for (key,) in rows]

    # --- The file and its thread ---

    async def _run(self, call: Callable[[], T]) -> T:
        """Run a call in this adapter's one thread: it waits for a file and for other processes.

        A cancelled caller leaves the call running, so that what it wrote counts as written.
        """
        if self._closed:
            raise StoreUnavailable(f"SQLite at {self.path}: the store was closed")
        if self._pid != os.getpid():
            _inherited.append(self._connection)
            self._start()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, call)
        except sqlite3.Error as error:
            raise StoreUnavailable(f"SQLite at {self.path}: {error}") from error

    def _start(self) -> None:
        self._pid = os.getpid()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="headgate-kv")
        try:
            # Each statement commits by itself (isolation_level=None) unless a transaction was begun.
            self._connection = sqlite3.connect(
                self.path, timeout=self.timeout, isolation_level=None, check_same_thread=False
            )
            switch_to_wal(self._connection.execute, self.timeout)
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute(_CREATE)
        except sqlite3.Error as error:
            raise StoreUnavailable(f"SQLite at {self.path}: {error}") from error

    def _stop(self) -> None:
        self._worker.shutdown()
        self._connection.close()


_inherited: list[sqlite3.Connection] = []
"""Connections of a parent process: they must neither be used nor closed in the child."""
