"""The memory store keeps every promise to coroutines."""

from __future__ import annotations

from headgate import MemoryStore
from tests.conformance.variants import TaskVariant


class TestAsyncMemory(TaskVariant):
    own_time = True
    effort = 0.4

    def make_store(self) -> MemoryStore:
        return MemoryStore(clock=self.clock)
