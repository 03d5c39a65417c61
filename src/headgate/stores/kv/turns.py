"""Fair queues by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headgate._concurrency import AsyncEvent
from headgate._fair_queue import FairQueue


class KeyTurns:
    """One task at a time per name, within this process."""

    def __init__(self) -> None:
        self._queue = FairQueue()
        self._failures: dict[str, int] = {}

    @asynccontextmanager
    async def take(self, name: str) -> AsyncIterator[Turn]:
        """Wait for the turn, in order of arrival; it ends with the block."""
        turn, ticket = Turn(self._failures, name), AsyncEvent()
        try:
            if not self._queue.join(name, ticket):
                while not await ticket.wait(self._queue.pause(name)):
                    self._queue.wake_first(name)
            yield turn
        finally:
            ticket.is_over = True
            self._queue.leave(name, ticket)
            if not self._queue.is_taken(name):
                self._failures.pop(name, None)


class Turn:
    """A place in a queue."""

    def __init__(self, failures: dict[str, int], name: str) -> None:
        self._failures = failures
        self._name = name
        self._failures_before = failures.get(name, 0)

    def fail(self) -> None:
        """Make the waiting tasks fail."""
        self._failures[self._name] = self._failures.get(self._name, 0) + 1

    @property
    def is_hopeless(self) -> bool:
        """Whether a task has failed since this place was taken."""
        return self._failures.get(self._name, 0) != self._failures_before
