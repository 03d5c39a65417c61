"""A key-value store with compare-and-swap keeps its promises: one rule per limiter, and no moved holds.

Fixed windows are left out: they keep a count per window, so a clock that goes back finds the count of the earlier window.
"""

from __future__ import annotations

from headgate.stores.kv import KVStore, MemoryKV
from headgate.testing import AsyncStoreContract


class TestKeyValueStore(AsyncStoreContract):
    own_time = True
    kinds = ("sliding_window", "sliding_log", "token_bucket")
    missing_features = frozenset(
        {"several_rules", "units", "moves", "quotas", "concurrent", "calendar", "penalty"}
    )
    effort = 0.2

    def make_store(self) -> KVStore:
        return KVStore(MemoryKV(), clock=self.clock)
