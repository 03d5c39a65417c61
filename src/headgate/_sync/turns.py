# Generated from src/headgate/_async/turns.py by tools/unasync.py. Do not edit.
"""First come, first served, per key, within this process."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque

from headgate._concurrency import Event


class Turns:
    """Queues by key. Whoever is at the front of a queue has the turn, until it leaves."""

    def __init__(self) -> None:
        self._queues: dict[object, deque[Event]] = {}
        self._lock = threading.Lock()
        _all_turns.add(self)

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

    def _forget(self) -> None:
        self._queues.clear()
        self._lock = threading.Lock()


_all_turns: weakref.WeakSet[Turns] = weakref.WeakSet()


def _forget_all() -> None:
    """After a fork nobody is left who queued in the parent."""
    for turns in list(_all_turns):
        turns._forget()


os.register_at_fork(after_in_child=_forget_all)
