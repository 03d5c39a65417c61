"""An SQLite file that threads, tasks and processes share, each transaction as a whole or not at all."""

from __future__ import annotations

import asyncio
import contextlib
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
from headgate.stores.base import REENTERED, Closing, Guarantees, HeldInForks, new_rlock, while_locked

__all__ = ["switch_to_wal"]

T = TypeVar("T")

logger = logging.getLogger("headgate")

_PAUSE_BETWEEN_SWITCHES = 0.005  # seconds
_LONGEST_TIMEOUT = 3600


class SQLiteFile(Closing):
    """A file with the tables of `schema`; one that was opened before a fork is opened anew after it.

    Args:
        path: The file; made if it does not exist.
        timeout: Seconds to wait for other processes that are writing before `StoreUnavailable` is raised.
        clock: Where time comes from; by default the machine's wall clock, which all its processes share.
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
        self._lock: Any = new_rlock()
        self._busy = False
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
        """Return that of `sqlite:///relative/path`, `sqlite:////absolute/path` or `sqlite:///:memory:`."""
        scheme, separator, path = url.partition(":///")
        path = unquote(path)
        if scheme.lower() != "sqlite" or not separator or not path or "\0" in path:
            raise ConfigError(
                f"{url!r}: write 'sqlite:///relative/path.db', 'sqlite:////absolute/path.db' or 'sqlite:///:memory:'"
            )
        return cls(path)

    def close(self) -> None:
        """Close the file, once what tasks have asked for is done."""
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
        """As `close`."""
        await asyncio.to_thread(self.close)

    def transact(self, work: Callable[[sqlite3.Connection], T], *, write: bool) -> T:
        """Do work in one transaction: alone if it writes, else on one snapshot; as a whole or not at all."""
        try:
            begin = "BEGIN IMMEDIATE" if write else "BEGIN"
            result: T = while_locked(self._lock, self._transact, work, begin)
            return result
        except sqlite3.Error as error:
            raise StoreUnavailable(f"SQLite at {self.path}: {error}") from error

    def _transact(self, work: Callable[[sqlite3.Connection], T], begin: str) -> T:
        if self._busy:
            raise StoreUnavailable(f"SQLite at {self.path}: {REENTERED}")
        self._busy = True
        try:
            # It ends in C: a signal handler that raises (Ctrl-C, a worker's soft time-out) can come between no two steps
            # of that, to leave the file locked for ever.
            with self._connection or self._connect() as connection:
                connection.execute(begin)
                return work(connection)
        finally:
            self._busy = False

    def _connect(self) -> sqlite3.Connection:
        if self.is_closed:
            raise StoreUnavailable(f"SQLite at {self.path}: the store was closed")
        try:
            # The lock serialises the threads; a transaction says itself when it begins (isolation_level=None).
            connection = sqlite3.connect(
                self.path, timeout=self.timeout, isolation_level=None, check_same_thread=False
            )
            try:
                switch_to_wal(connection.execute, self.timeout)
                connection.execute("PRAGMA synchronous = NORMAL")
                for statement in self.schema:
                    connection.execute(statement)
            except BaseException:  # also what a signal handler raises
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
        """Run a call in this store's thread: it waits for a file and for other processes.

        If the caller is cancelled, a call that has not begun is dropped, unless it `completes` in any case. What one that
        has begun returns goes to `abandoned`.
        """
        running = self.start_in_worker(call)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def hand_over(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop was closed, so no task waits
                loop.call_soon_threadsafe(_hand_over, running, answer)

        running.add_done_callback(hand_over)
        try:
            return await answer
        except asyncio.CancelledError:
            if completes or not running.cancel():
                running.add_done_callback(partial(look_after, abandoned))
            raise

    def start_in_worker(self, call: Callable[[], T]) -> Future[T]:
        """Have a call run in this store's thread, after those that came before it."""
        try:
            return (self._worker or self._make_worker()).submit(call)
        except RuntimeError as error:  # it was shut down in this moment, or there is no thread to be had
            raise StoreUnavailable(f"SQLite at {self.path}: {error}") from error

    def _make_worker(self) -> ThreadPoolExecutor:
        # Not under the lock of transactions: an event loop does not wait for these.
        with self._worker_lock:
            if not self._takes_tasks:
                raise StoreUnavailable(f"SQLite at {self.path}: the store was closed")
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="headgate-sqlite")
            return self._worker

    # A fork in the middle of a transaction would leave the lock taken for ever in the child. So it is held during a fork.

    def before_fork(self) -> None:
        self._forks.before(self._lock)

    def after_fork_in_parent(self) -> None:
        self._forks.after_in_parent(self._lock)

    def after_fork_in_child(self) -> None:
        self._lock = self._forks.after_in_child(self._lock, new_rlock)
        self._busy = False
        if self._connection is not None:
            _inherited.append(self._connection)
        self._connection = None
        self._worker = None


def _hand_over(running: Future[T], answer: asyncio.Future[T]) -> None:
    """Let a task have what a call in the store's thread came to."""
    if answer.done():
        return
    error = running.exception()
    if error is None:
        answer.set_result(running.result())
    else:
        answer.set_exception(error)


def look_after(abandoned: Callable[[T], None] | None, running: Future[T]) -> None:
    """See to a call whose caller was cancelled."""
    try:
        result = running.result()
        if abandoned is not None:
            abandoned(result)
    except HeadgateError as error:
        logger.warning("what a cancelled caller had asked for could not be done: %s", error)


def switch_to_wal(
    execute: Callable[[str], object], timeout: float, pause: Callable[[float], object] = time.sleep
) -> None:
    """Make an SQLite file one that can be read while it is written.

    SQLite does not wait here for others that switch or write at the same moment, as processes do that start together. So
    we do.

    Args:
        execute: Executes a statement on a connection to the file.
        timeout: Seconds to wait before SQLite's error is raised.
        pause: Waits for so many seconds, between two attempts.
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
"""Connections of a parent process, which must be neither used nor closed here."""
