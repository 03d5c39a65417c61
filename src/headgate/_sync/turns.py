# Generated from src/headgate/_async/turns.py by tools/unasync.py. Do not edit.
"""First come, first served, per key, within this process."""

from __future__ import annotations

import threading
from collections import deque

from headgate._concurrency import Event
from headgate._fork import watch


class Turns:
    """Queues by key. Whoever is at the front of a queue has the turn, until it leaves."""

    def __init__(self) -> None:
        self._queues: dict[object, deque[Event]] = {}
        self._lock = threading.Lock()
        watch(self)

    def take(self, key: object, timeout: float | None) -> Event | None:
        """Queue up and return the ticket once it is at the front; `None` if that takes too long."""
        ticket = Event()
        with self._lock:
            queue = self._queues.setdefault(key, deque())
            queue.append(ticket)
            if queue[0] is ticket:
                return ticket
        try:
            if ticket.wait(timeout):
                return ticket
        except BaseException:  # cancelled, or interrupted: the place is given back, whatever it was
            self.leave(key, ticket)
            raise
        self.leave(key, ticket)
        return None

    def taken(self, key: object) -> bool:
        """Return whether somebody has the turn."""
        return key in self._queues

    def leave(self, key: object, ticket: Event) -> None:
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
