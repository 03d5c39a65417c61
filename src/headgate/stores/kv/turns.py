"""First come, first served, by name, within one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headgate.stores.kv.loops import PerLoop


class KeyTurns:
    """One at a time per name, within one event loop."""

    def __init__(self) -> None:
        self._queues: PerLoop[dict[str, _Queue]] = PerLoop(dict)

    @asynccontextmanager
    async def take(self, name: str) -> AsyncIterator[Turn]:
        """Wait for the turn, first come, first served; it ends with the block."""
        queues = self._queues.own()
        queue = queues.setdefault(name, _Queue())
        queue.length += 1
        turn = Turn(queue)
        try:
            async with queue.lock:
                yield turn
        finally:
            queue.length -= 1
            if not queue.length:
                del queues[name]


class _Queue:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.length = 0
        self.failures = 0


class Turn:
    """A place in a queue."""

    def __init__(self, queue: _Queue) -> None:
        self._queue = queue
        self._failures_before = queue.failures

    def fail(self) -> None:
        """Tell those who are waiting that it is not worth it."""
        self._queue.failures += 1

    @property
    def is_hopeless(self) -> bool:
        """Whether somebody has failed since this place was taken."""
        return self._queue.failures != self._failures_before
