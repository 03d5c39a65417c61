"""First come, first served, per key, within this process.

A ticket leaves its queue when its waiter calls `leave`. That call may never come: the event loop of the waiter was closed,
or a signal handler raised just before it. Such a ticket is dead, and `Event.set` returns false. Every call removes dead
tickets from the front; waiters call `wake_first` after `pause` seconds for that reason.

Any call may be interrupted by a signal handler that raises, or by the garbage collector, which closes forgotten coroutines
that then `leave` in the middle of another call. Therefore the lock is re-entrant, and a queue is looked up, changed and
removed without a call in between.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from headgate._concurrency import AsyncEvent, Event
from headgate._fork import watch

Ticket = Event | AsyncEvent

LOOK_EVERY = 1.0
"""Seconds after which a waiter checks whether the front of its queue is dead."""

LOOKS_PER_SECOND = 1000
"""Checks per second of all waiters together; with many waiters, each checks less often."""

POLL_EVERY = 0.25
"""Seconds after which a waiter tries again to take a place, which another process may have released."""


class FairQueue:
    """Queues of tickets by key. The ticket at the front of a queue has the turn, until it leaves.

    Nothing here waits. A waiter makes a new ticket, calls `join` and, if that returns false, waits for the ticket. At the
    end it sets `ticket.is_over`, without a call before, and calls `leave`.
    """

    def __init__(self) -> None:
        # Not a plain dict: to find its first entry takes as many steps as entries were removed before it.
        self._queues: dict[object, OrderedDict[Ticket, None]] = {}
        self.lock = threading.RLock()
        watch(self)

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits."""
        return not self._queues

    def is_taken(self, key: object) -> bool:
        """Return whether there is a queue for the key."""
        return key in self._queues

    def leave(self, key: object, ticket: Ticket) -> None:
        """Leave the queue, from the front or from within."""
        with self.lock:
            queue = self._queues.get(key)
            if queue is not None and ticket in queue:  # else it was removed as dead, or in a fork
                del queue[ticket]
            self.wake_first(key)

    def after_fork_in_child(self) -> None:
        """Forget the parent's queues: the threads and tasks that wait there do not exist here."""
        self._queues.clear()
        self.lock = threading.RLock()

    def join(self, key: object, ticket: Ticket) -> bool:
        """Put a ticket at the end of the queue, and return whether that is also the front."""
        with self.lock:
            self.append(key, ticket)
            return self.wake_first(key, ticket)

    def append(self, key: object, ticket: Ticket) -> None:
        """Put a ticket at the end of the queue, where it sleeps until it is woken."""
        new: OrderedDict[Ticket, None] = OrderedDict()
        with self.lock:
            try:
                queue = self._queues[key]
            except KeyError:
                queue = self._queues[key] = new
            queue[ticket] = None

    def wake_first(self, key: object, newcomer: Ticket | None = None) -> bool:
        """Remove dead tickets from the front and give the next one its turn; return whether that is the newcomer."""
        with self.lock:
            while True:
                try:
                    queue = self._queues[key]
                except KeyError:
                    return False
                for first in queue:
                    if first is newcomer:
                        return True
                    if first.set():
                        return False
                    if first in queue:
                        del queue[first]
                    break
                else:
                    del self._queues[key]

    def pause(self, key: object) -> float:
        """Return the seconds after which a waiter checks whether the front of its queue is dead."""
        return LOOK_EVERY + self._spread(key)

    def poll(self, key: object) -> float:
        """Return the seconds after which a sleeper tries again without having been woken."""
        return POLL_EVERY + self._spread(key)

    def _spread(self, key: object) -> float:
        """Return the seconds to add to a pause, so that many waiters together do not check too often."""
        return (len(self._queues) + len(self._queues.get(key, ()))) / LOOKS_PER_SECOND


class PlaceWaiter:
    """The position of one waiter in the queue of the place that it waits for, at most one at a time.

    Attributes:
        ticket: Set when the waiter is first in the queue and a place was released.
    """

    def __init__(self, queue: FairQueue, ticket: Ticket) -> None:
        self._queue = queue
        self._place: object = None
        self.ticket: Any = ticket

    def rearm(self) -> None:
        """Clear the ticket before the waiter tries to take a place, so that a later release is noticed."""
        with self._queue.lock:
            self.ticket.clear()

    def moves_to(self, place: object) -> bool:
        """Wait for this place from now on, or for none; return false if it did so before."""
        before = self._place
        if place == before:
            return False
        if before is not None:
            self._queue.leave(before, self.ticket)
        self._place = place
        if place is not None:
            self._queue.append(place, self.ticket)
        return True

    def leave(self) -> None:
        """Stop waiting."""
        self.ticket.is_over = True  # before the call, in which a signal handler could raise
        if self._place is not None:
            self._queue.leave(self._place, self.ticket)
