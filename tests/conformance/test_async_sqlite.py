"""The SQLite store keeps its promises to coroutines."""

from __future__ import annotations

from headgate import SQLiteStore
from tests.conformance.variants import TaskVariant


class TestAsyncSQLite(TaskVariant):
    own_time = True
    effort = 0.2

    def make_store(self) -> SQLiteStore:
        return SQLiteStore(self.folder / "limits.db", clock=self.clock)
