"""Queues of waiting calls in a shared store, in one order for all processes.

A waiting call has a ticket in the queue of its complete key. Only the call with the first ticket of a queue may try to
take units; other calls sleep until they are woken as the first. If the first call waits for a place of a `concurrent`
rule, it is also in the queue of that place, and each release wakes the first call of this queue.

Tickets expire unless their process renews them, so a dead process delays other calls for a limited time only. Wake-ups
are fast but may be lost, so every waiter also polls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from hashlib import blake2b
from itertools import count
from secrets import token_hex
from typing import Any, Protocol
from weakref import WeakValueDictionary

from headgate._concurrency import AsyncEvent, Event
from headgate._fork import watch
from headgate.errors import StoreError
from headgate.keys import PlainKey, queue_prefix, storage_key, storage_prefix
from headgate.rules import Rule

logger = logging.getLogger("headgate")

KeyParts = tuple[PlainKey, ...]
"""A complete key: the key of each rule."""

PROCESS_LENGTH = 16
"""Characters at the start of a ticket that are the same for all tickets of a process."""

RENEW_EVERY = 3.0
"""Seconds between two calls to the store of a waiter that is woken when it is first."""

POLL_EVERY = 0.25
"""The same for a waiter whose process receives no messages."""

CALLS_PER_SECOND = 5000
"""Such calls per second of all waiters of a process together; with many waiters, each calls less often."""

LEAST_LIFETIME = 10.0
"""The shortest lifetime of a ticket in seconds."""


Ticket = Any
"""A waiting call in queues: its event, or for a store a text that no other call has."""


class WakeUps:
    """The waiters of this process, by the texts of their tickets.

    Attributes:
        process: A random number of this process, which begins all of its tickets.
        works: Whether the store has woken a waiter of this process, and none became first unnoticed since.
    """

    process: str

    def __init__(self) -> None:
        # A waiter that was interrupted may forget to remove its event.
        self._events: WeakValueDictionary[str, Event | AsyncEvent] = WeakValueDictionary()
        self.works = False
        self._is_reported = False
        self._numbers = count()
        self.after_fork_in_child()
        watch(self)

    def new_ticket(self, event: Event | AsyncEvent) -> str:
        """Return a ticket that no other call has, in any process."""
        ticket = f"{self.process}{next(self._numbers):x}"
        self._events[ticket] = event
        return ticket

    def listen(self) -> None:
        """Prepare for messages of the store, because a waiter is going to sleep."""

    def wake(self, ticket: str) -> None:
        """Wake a waiter, if it is one of this process."""
        event = self._events.get(ticket)
        if event is not None:
            event.set()

    def report(self, error: StoreError) -> None:
        """Log, once, why waiting calls of several processes have no order."""
        if not self._is_reported:
            self._is_reported = True
            logger.warning("waiting calls are admitted in any order: %s", error)

    def pause(self) -> float:
        """Return the seconds after which a waiter calls the store even if it was not woken."""
        return (RENEW_EVERY if self.works else POLL_EVERY) + len(self._events) / CALLS_PER_SECOND

    def lifetime(self) -> float:
        """Return the seconds for which to keep a ticket without a further call."""
        return max(LEAST_LIFETIME, 4 * self.pause())

    def after_fork_in_child(self) -> None:
        """Forget the waiters of the parent."""
        self.process = token_hex(PROCESS_LENGTH // 2)
        self._events.clear()
        self.works = False


class QueueNames:
    """The names of a limiter's queues in a store.

    Args:
        namespace: The namespace of the store.
        limiter: The limiter's name.
        rules: Its rules.
        name_state: Returns the name of a state from the prefix of its rule and the part of the key.
    """

    def __init__(
        self,
        namespace: str,
        limiter: str,
        rules: tuple[Rule, ...],
        name_state: Callable[[bytes, PlainKey], bytes] = storage_key,
    ) -> None:
        self._prefix = queue_prefix(namespace, limiter)
        self._name_state = name_state
        self._state_prefixes = [storage_prefix(namespace, limiter, rule) for rule in rules]
        self._rules = rules

    def of_key(self, parts: KeyParts) -> bytes:
        """Return the name of the queue of a complete key, which looks like that of a state."""
        by_scope = {rule.scope: part for rule, part in zip(self._rules, parts, strict=True)}
        names = (storage_key(b"", part) for part in by_scope.values())
        digest = blake2b(b"".join(b"%d:%b" % (len(name), name) for name in names), digest_size=16)
        return self._name_state(self._prefix, digest.hexdigest())

    def of_places(self, parts: KeyParts) -> dict[str, bytes]:
        """Return the names of the queues for places, by the names of the `concurrent` rules.

        They are those of the states, so that the store finds the queue when a place is released.
        """
        states = map(self._name_state, self._state_prefixes, parts)
        pairs = zip(self._rules, states, strict=True)
        return {rule.name: state for rule, state in pairs if rule.kind == "concurrent"}


class QueueMethods(Protocol):
    """The methods of a limiter's queues that do not wait for a store.

    Attributes:
        is_remote: Whether they are on a server.
    """

    is_remote: bool

    def of_key(self, parts: KeyParts) -> Any:
        """Return the queue of a complete key, given as the key of each rule."""

    def of_places(self, parts: KeyParts) -> Mapping[str, Any]:
        """Return the queues of places by the names of the `concurrent` rules."""

    def new_ticket(self, event: Any) -> Ticket:
        """Return a ticket for a new waiter, whose event is set when it is first or a place was released."""

    def leave(self, queue: Any, ticket: Ticket) -> None:
        """Leave a queue; if the ticket was first, the next one is woken. It does not fail, and coroutines do not wait."""

    def released(self, parts: KeyParts) -> None:
        """Wake the first waiter for each place of a key, unless the store does so itself."""

    def pause(self, queue: Any, *, is_place: bool = False) -> float:
        """Return the seconds after which a sleeping waiter enters the queue again, which keeps its position."""

    def missed(self) -> None:
        """Note that a waiter became first without having been woken."""


class Queues(QueueMethods, Protocol):
    """The queues of a limiter's waiting calls."""

    def enter(self, queue: Any, ticket: Ticket, priority: int) -> bool:
        """Enter a queue, or stay in it; return whether the ticket is first.

        Raises:
            StoreError: The store failed.
        """


class AsyncQueues(QueueMethods, Protocol):
    """Like `Queues`, for coroutines."""

    async def enter(self, queue: Any, ticket: Ticket, priority: int) -> bool:
        """See `Queues.enter`."""
