"""Handles on stores that were opened by URL.

In one process, all handles with the same key use one store, and so its connections and its breaker. A limiter or a policy
that opens a URL has one handle. Closing the last open handle closes the store, and the next handle opens a new store.

A handle that is garbage-collected without `close` still counts as open, because a hold or a limiter of a policy may still
use the store. Such a store is closed when it is garbage-collected: the table below has only weak references.

A forked process inherits the handles. Its store connects again, and closing it there does not affect the parent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from headgate._fork import watch
from headgate.stores.base import while_locked


class StoreEntry:
    """A store, and the number of its open handles."""

    __slots__ = ("__weakref__", "handles", "store")

    def __init__(self, store: Any) -> None:
        self.store = store
        self.handles = 0


_lock: Any = watch(threading.RLock())
_entries: WeakValueDictionary[str, StoreEntry] = WeakValueDictionary()


class StoreHandle:
    """The use of a store by one limiter or policy.

    Args:
        make: Creates the store, without connecting; called unless an open store has the same key.
        key: The URL of a shared store, which may contain credentials, or `None` for a private store.

    Attributes:
        store: The store.
    """

    def __init__(self, make: Callable[[], Any], key: str | None = None) -> None:
        self._key = key
        self._entry = StoreEntry(make()) if key is None else while_locked(_lock, _join, key, make)
        self._is_open = True
        self.store: Any = self._entry.store

    def close(self) -> None:
        """Close the store if no other handle on it is open; a second call releases nothing more."""
        if while_locked(_lock, self._release):
            self.store.close()

    async def aclose(self) -> None:
        """Like `close`, for coroutines."""
        if while_locked(_lock, self._release):
            await self.store.aclose()

    def _release(self) -> bool:
        """Return whether to close the store."""
        if self._key is None:
            return True
        if not self._is_open:
            return False
        self._is_open = False
        self._entry.handles -= 1
        if not self._entry.handles and _entries.get(self._key) is self._entry:
            del _entries[self._key]
        return not self._entry.handles


def _join(key: str, make: Callable[[], Any]) -> StoreEntry:
    entry = _entries.get(key)
    if entry is None or entry.store.is_closed:  # the store itself was closed, not a handle
        entry = _entries[key] = StoreEntry(make())
    entry.handles += 1
    return entry
