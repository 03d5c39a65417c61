"""The SQLite store keeps every promise to coroutines."""

from __future__ import annotations

from headgate import SQLiteStore
from headgate.testing import AsyncStoreContract


class TestAsyncSQLiteAtGivenTimes(AsyncStoreContract):
    effort = 0.2

    def make_store(self) -> SQLiteStore:
        return SQLiteStore(self.folder / "limits.db")


class TestAsyncSQLiteByItsOwnClock(AsyncStoreContract):
    own_time = True
    effort = 0.1
    test_vectors_are_answered_to_the_microsecond = None  # `test_sqlite` runs them with its own clock

    def make_store(self) -> SQLiteStore:
        return SQLiteStore(self.folder / "limits.db", clock=self.clock)
