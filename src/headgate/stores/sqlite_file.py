"""An SQLite file shared by threads, tasks and processes."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar
from urllib.parse import unquote

from headgate._checks import is_number
from headgate._fork import watch
from headgate.clock import Clock, WallClock, check_clock
from headgate.errors import ConfigError, HeadgateError, StoreUnavailable
from headgate.stores.base import Closing, Guarantees, HeldInForks, while_locked

__all__ = ["switch_to_wal"]

T = TypeVar("T")

logger = logging.getLogger("headgate")

_PAUSE_BETWEEN_SWITCHES = 0.005  # seconds
_LONGEST_TIMEOUT = 3600


class SQLiteFile(Closing):
    """A file with the tables of `schema`; after a fork the child opens it again.

    Args:
        path: The file, created if it does not exist.
        timeout: Seconds to wait for other writing processes before `StoreUnavailable` is raised.
        clock: The clock; by default the machine's wall clock, shared by all its processes.
    """

    schema: ClassVar[tuple[str, ...]]
    guarantees = Guarantees(
        shared=True,
        durable=True,
        may_lose="nothing when a process dies; the last moments when the machine does (WAL, synchronous=NORMAL)",
    )

    def __init__(
        self, path: str | os.PathLike[str], *, timeout: float = 5.0, clock: Clock | None = None
    ) -> None:
        self.path = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
        if not self.path or self.path.startswith("sqlite:"):
            raise ConfigError(f"path is that of a file, like 'limits.db', or ':memory:', not {path!r}")
        if not is_number(timeout) or not 0 <= timeout <= _LONGEST_TIMEOUT:
            raise ConfigError(f"timeout= is seconds, from 0 to {_LONGEST_TIMEOUT}, not {timeout!r}")
        self.timeout = timeout
        self.clock: Clock = check_clock(clock) or WallClock()
        self._lock: Any = threading.RLock()
        self._forks = HeldInForks()
        self._connection: sqlite3.Connection | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._worker_lock = watch(threading.Lock())
        self._takes_tasks = True
        self.is_closed = False
        with self._lock:
            self._connect()
        watch(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}>"

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Return the store of `sqlite:///relative/path`, `sqlite:////absolute/path` or `sqlite:///:memory:`."""
        scheme, separator, path = url.partition(":///")
        path = unquote(path)
        if scheme.lower() != "sqlite" or not separator or not path or "\0" in path:
            raise ConfigError(
                f"{url!r}: write 'sqlite:///relative/path.db', 'sqlite:////absolute/path.db' or 'sqlite:///:memory:'"
            )
        return cls(path)

    def close(self) -> None:
        """Close the file after the calls of tasks are completed."""
        with self._worker_lock:
            worker, self._worker, self._takes_tasks = self._worker, None, False
        if worker is not None:
            worker.shutdown()
        with self._lock:
            self.is_closed = True
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    async def aclose(self) -> None:
        """Like `close`."""
        await asyncio.to_thread(self.close)

    def transact(self, work: Callable[[sqlite3.Connection], T], *, write: bool) -> T:
        """Run a function in one transaction: exclusive if it writes, else on a snapshot."""
        try:
            begin = "BEGIN IMMEDIATE" if write else "BEGIN"
            result: T = while_locked(self._lock, self._transact, work, begin)
            return result
        except sqlite3.Error as error:
            raise StoreUnavailable(f"SQLite at {self.path}: {error}") from error

    def _transact(self, work: Callable[[sqlite3.Connection], T], begin: str) -> T:
        # `with` ends the transaction in C code, so a signal handler that raises (Ctrl-C, a soft time-out) cannot
        # interrupt it and leave the file locked.
        with self._connection or self._connect() as connection:
            connection.execute(begin)
            return work(connection)

    def _connect(self) -> sqlite3.Connection:
        if self.is_closed:
            raise StoreUnavailable(f"SQLite at {self.path}: the store was closed")
        try:
            # The lock serialises threads; transactions begin explicitly (isolation_level=None).
            connection = sqlite3.connect(
                self.path, timeout=self.timeout, isolation_level=None, check_same_thread=False
            )
            try:
                switch_to_wal(connection.execute, self.timeout)
                connection.execute("PRAGMA synchronous = NORMAL")
                for statement in self.schema:
                    connection.execute(statement)
            except BaseException:  # also an exception from a signal handler
                connection.close()
                raise
        except sqlite3.Error as error:
            folder = Path(self.path).resolve().parent
            hint = "" if folder.is_dir() else f" (there is no folder {folder})"
            raise StoreUnavailable(f"SQLite at {self.path}: {error}{hint}") from error
        self._connection = connection
        return connection

    async def in_worker(
        self, call: Callable[[], T], *, completes: bool = False, abandoned: Callable[[T], None] | None = None
    ) -> T:
        """Run a blocking call in this store's thread.

        If the caller is cancelled before the call begins, it is dropped, unless `completes` is true. The result of a call
        whose caller was cancelled goes to `abandoned`.
        """
        running = self.start_in_worker(call)
        try:
            return await asyncio.shield(asyncio.wrap_future(running))
        except asyncio.CancelledError:
            if completes or not running.cancel():
                running.add_done_callback(partial(look_after, abandoned))
            raise

    def start_in_worker(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call for this store's thread."""
        try:
            return (self._worker or self._make_worker()).submit(call)
        except RuntimeError as error:  # it was shut down, or the thread cannot be started
            raise StoreUnavailable(f"SQLite at {self.path}: {error}") from error

    def _make_worker(self) -> ThreadPoolExecutor:
        # Not with the lock of transactions, because an event loop must not wait for them.
        with self._worker_lock:
            if not self._takes_tasks:
                raise StoreUnavailable(f"SQLite at {self.path}: the store was closed")
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="headgate-sqlite")
            return self._worker

    # A fork during a transaction would leave the lock locked in the child. So it is held during a fork.

    def before_fork(self) -> None:
        self._forks.before(self._lock)

    def after_fork_in_parent(self) -> None:
        self._forks.after_in_parent(self._lock)

    def after_fork_in_child(self) -> None:
        self._lock = self._forks.after_in_child(self._lock)
        if self._connection is not None:
            _inherited.append(self._connection)
        self._connection = None
        self._worker = None


def look_after(abandoned: Callable[[T], None] | None, running: Future[T]) -> None:
    """Finish a call whose caller was cancelled."""
    try:
        result = running.result()
        if abandoned is not None:
            abandoned(result)
    except HeadgateError as error:
        logger.warning("a cancelled call could not be completed: %s", error)


def switch_to_wal(
    execute: Callable[[str], object], timeout: float, pause: Callable[[float], object] = time.sleep
) -> None:
    """Switch an SQLite file to WAL mode, in which it can be read while it is written.

    SQLite does not wait for other connections in this statement, so it is repeated while the file is busy.

    Args:
        execute: Executes a statement on a connection to the file.
        timeout: Seconds to wait before SQLite's error is raised.
        pause: Sleeps for a number of seconds between two attempts.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
            pause(_PAUSE_BETWEEN_SWITCHES)
        else:
            return


_inherited: list[sqlite3.Connection] = []
"""Connections of the parent process, which must be neither used nor closed in a child."""
