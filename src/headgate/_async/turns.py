"""First come, first served, per key, within this process."""

from __future__ import annotations

import threading
from collections import deque

from headgate._concurrency import AsyncEvent
from headgate._fork import watch


class AsyncTurns:
    """Queues by key. Whoever is at the front of a queue has the turn, until it leaves."""

    def __init__(self) -> None:
        self._queues: dict[object, deque[AsyncEvent]] = {}
        self._lock = threading.Lock()
        watch(self)

    async def take(self, key: object, timeout: float | None) -> AsyncEvent | None:
        """Queue up and return the ticket once it is at the front; `None` if that takes too long."""
        ticket = AsyncEvent()
        with self._lock:
            queue = self._queues.setdefault(key, deque())
            queue.append(ticket)
            if queue[0] is ticket:
                return ticket
        try:
            if await ticket.wait(timeout):
                return ticket
        except BaseException:  # cancelled, or interrupted: the place is given back, whatever it was
            self.leave(key, ticket)
            raise
        self.leave(key, ticket)
        return None

    def taken(self, key: object) -> bool:
        """Return whether somebody has the turn."""
        return key in self._queues

    def leave(self, key: object, ticket: AsyncEvent) -> None:
        """Leave the queue, from the front or from within."""
        with self._lock:
            queue = self._queues.get(key)
            if queue is None or ticket not in queue:
                return  # the queue was forgotten in a fork
            queue.remove(ticket)
            if queue:
                queue[0].set()
            else:
                del self._queues[key]

    def after_fork_in_child(self) -> None:
        """Forget the parent's queues: the threads and tasks that wait there do not exist here."""
        self._queues.clear()
        self._lock = threading.Lock()
