"""Queues of waiting calls within this process, in the order of `algorithms.waiting`.

A ticket is an event. It leaves its queue when its waiter calls `leave`. That call may never come: the event loop of the
waiter was closed, or a signal handler raised just before it. Such a ticket is dead. Every call removes dead tickets from the
front, and waiters call `join` again after some time for that reason.

Any call may be interrupted by a signal handler that raises, or by the garbage collector, which closes forgotten coroutines
that then `leave` in the middle of another call. Therefore the lock is re-entrant, and every step works on what is there.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from operator import itemgetter
from typing import NamedTuple

from headgate._concurrency import AsyncEvent, Event
from headgate._fork import watch
from headgate.algorithms.waiting import DEFAULT_PRIORITY, next_tag

Ticket = Event | AsyncEvent

LOOK_EVERY = 1.0
"""Seconds after which a waiter checks whether the front of its queue is dead."""

LOOKS_PER_SECOND = 1000
"""Checks per second of all waiters together; with many waiters, each checks less often."""

POLL_EVERY = 0.25
"""Seconds after which a waiter tries again to take a place, which another process may have released."""


class Front(NamedTuple):
    """The front of a queue; without a ticket if the queue is empty."""

    ticket: Ticket | None = None
    tag: int = 0
    is_new: bool = False
    """Whether dead tickets were removed before it."""


class FairQueue:
    """Queues of tickets by key. The ticket at the front of a queue has the turn, until it leaves.

    Nothing here waits. A waiter makes a new ticket, calls `join` and, if that returns false, waits for the ticket. At the
    end it sets `ticket.is_over`, without a call before, and calls `leave`.
    """

    def __init__(self) -> None:
        # By key and priority; the tickets with their tags. Not in a plain dict: to find its first entry takes as many steps
        # as entries were removed before it.
        self._queues: dict[object, dict[int, OrderedDict[Ticket, int]]] = {}
        self._lock = threading.RLock()
        watch(self)

    def is_taken(self, key: object) -> bool:
        """Return whether there is a queue for the key."""
        return key in self._queues

    def length(self, key: object) -> int:
        """Return the number of tickets in a queue."""
        return sum(len(line) for line in list(self._queues.get(key, {}).values()))

    def join(self, key: object, ticket: Ticket, priority: int = DEFAULT_PRIORITY) -> bool:
        """Put a ticket into the queue, unless it is there; return whether it is at the front."""
        with self._lock:
            front = self._front(key)
            line = self._queues.setdefault(key, {}).setdefault(priority, OrderedDict())
            if ticket not in line:
                line[ticket] = next_tag(front.tag, next(reversed(line.values()), 0), priority)
            if front.ticket is not None and front.ticket is not ticket:
                if front.is_new:
                    self.wake_first(key)
                return False
            return True

    def leave(self, key: object, ticket: Ticket) -> None:
        """Leave the queue, from the front or from within."""
        with self._lock:
            front = self._front(key)
            self._remove(key, ticket)
            if front.is_new or front.ticket is ticket:
                self.wake_first(key)

    def wake_first(self, key: object) -> None:
        """Wake the ticket at the front."""
        with self._lock:
            while (first := self._front(key).ticket) is not None and not first.set():
                self._remove(key, first)

    def pause(self, key: object) -> float:
        """Return the seconds after which a waiter checks whether the front of its queue is dead."""
        return LOOK_EVERY + self._spread(key)

    def poll(self, key: object) -> float:
        """Return the seconds after which a sleeper tries again without having been woken."""
        return POLL_EVERY + self._spread(key)

    def after_fork_in_child(self) -> None:
        """Forget the parent's queues: the threads and tasks that wait there do not exist here."""
        self._queues.clear()
        self._lock = threading.RLock()

    def _spread(self, key: object) -> float:
        """Return the seconds to add to a pause, so that many waiters together do not check too often."""
        return (len(self._queues) + self.length(key)) / LOOKS_PER_SECOND

    def _front(self, key: object) -> Front:
        """Remove dead tickets from the front of a queue, and return the front."""
        is_new = False
        while True:
            tag, _, ticket = min(self._fronts(key), key=itemgetter(0, 1), default=(0, 0, None))
            if ticket is None or not ticket.is_dead:
                return Front(ticket, tag, is_new)
            self._remove(key, ticket)
            is_new = True

    def _fronts(self, key: object) -> Iterator[tuple[int, int, Ticket]]:
        """Yield the tag, the negative priority and the first ticket of each priority."""
        for priority, line in list(self._queues.get(key, {}).items()):
            for ticket, tag in line.items():
                yield tag, -priority, ticket
                break

    def _remove(self, key: object, ticket: Ticket) -> None:
        """Remove a ticket, if it is there; also its line and its queue, if they are empty now."""
        queue = self._queues.get(key, {})
        for priority, line in list(queue.items()):
            line.pop(ticket, None)
            if not line:
                queue.pop(priority, None)
        if not queue:
            self._queues.pop(key, None)
