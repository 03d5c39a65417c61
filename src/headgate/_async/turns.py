"""Waiting for a turn, per key, within this process."""

from __future__ import annotations

from math import inf

from headgate._concurrency import AsyncEvent
from headgate._queues import Queues


class AsyncTurns(Queues[AsyncEvent]):
    """Queues of tickets by key. The ticket at the front of a queue has the turn, until it leaves."""

    async def take(self, key: object, ticket: AsyncEvent, timeout: float | None) -> bool:
        """Queue up with a new ticket, and return whether it came to the front within so many seconds.

        However this ends, the caller must then set `ticket.is_over`, without calling anything before, and `leave`.
        """
        if self._queue_up(key, ticket):
            return True
        ends = None if timeout is None else ticket.time() + timeout
        while True:
            pause = self._pause(key)
            left = inf if ends is None else ends - ticket.time()
            if await ticket.wait(min(pause, left)):
                return True
            if left <= pause:
                return False
            self._call_first(key)
