"""Objects per event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class PerLoop(Generic[T]):
    """One object per event loop, such as a lock or a connection, which other loops and child processes cannot use."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: WeakKeyDictionary[asyncio.AbstractEventLoop, T] = WeakKeyDictionary()

    def own(self) -> T:
        """Return the object of the running event loop."""
        loop = asyncio.get_running_loop()
        try:
            return self._made[loop]
        except KeyError:
            # A connection refers to its loop, so neither would be garbage-collected.
            for closed in [other for other in list(self._made) if other.is_closed()]:
                self._made.pop(closed, None)
            made = self._made[loop] = self._make()
            return made
