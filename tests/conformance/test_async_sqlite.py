"""The SQLite store keeps every promise to coroutines."""

from __future__ import annotations

from headgate import SQLiteStore
from headgate.testing import AsyncStoreContract


class TestAsyncSQLite(AsyncStoreContract):
    effort = 0.2

    def make_store(self) -> SQLiteStore:
        return SQLiteStore(self.folder / "limits.db")
