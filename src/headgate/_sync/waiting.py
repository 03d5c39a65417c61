# Generated from src/headgate/_async/waiting.py by tools/unasync.py. Do not edit.
"""The turn of a waiting call, and the queues of limiters whose store has none."""

from __future__ import annotations

from math import inf
from time import monotonic

from headgate._concurrency import Event
from headgate._fair_queue import FairQueue, Ticket
from headgate.errors import StoreError, StoreMisconfigured, StoreOverloaded
from headgate.outage.fallback import Health
from headgate.rules import Rule
from headgate.stores.queues import RENEW_EVERY, KeyParts, Queues


class LocalQueues:
    """The queues of a limiter's waiting calls in this process; see `Queues`.

    Args:
        rules: The limiter's rules.
        lines: The queues themselves, which all versions of a limiter in a policy file share.
    """

    is_remote = False

    def __init__(self, rules: tuple[Rule, ...], lines: FairQueue) -> None:
        self.lines = lines
        self._rules = rules

    def of_key(self, parts: KeyParts) -> object:
        return parts

    def of_places(self, parts: KeyParts) -> dict[str, object]:
        pairs = zip(self._rules, parts, strict=True)
        return {rule.name: (rule.identity, part) for rule, part in pairs if rule.kind == "concurrent"}

    def new_ticket(self, event: Ticket) -> Ticket:
        return event

    def enter(self, queue: object, ticket: Ticket, priority: int) -> bool:
        return self.lines.join(queue, ticket, priority)

    def leave(self, queue: object, ticket: Ticket) -> None:
        self.lines.leave(queue, ticket)

    def released(self, parts: KeyParts) -> None:
        for place in self.of_places(parts).values():
            if self.lines.is_taken(place):
                self.lines.wake_first(place)

    def pause(self, queue: object, *, is_place: bool = False) -> float:
        return self.lines.poll(queue) if is_place else self.lines.pause(queue)

    def missed(self) -> None:
        """Do nothing, because the call checks again soon."""


class WaitingTurn:
    """The turn of one waiting call among the calls with the same key.

    While the store is down, calls are not ordered: every call has its turn, and gets the answer of its failure policy.

    Args:
        queues: The limiter's queues.
        health: The health of its store.
        parts: The complete key.
        priority: Its priority.
        timeout: Seconds for which it waits for its turn, or `None`.

    Attributes:
        event: Set when the call should check its turn again.
    """

    def __init__(
        self, queues: Queues, health: Health, parts: KeyParts, priority: int, timeout: float | None
    ) -> None:
        self._queues = queues
        self._health = health
        self._queue = queues.of_key(parts)
        self._parts = parts
        self._place: object = None
        self._priority = priority
        self.event = Event()
        self._ticket = queues.new_ticket(self.event)
        self._ends = inf if timeout is None else self.event.time() + timeout
        self._has_come = False
        self._renew_at = 0.0
        self._was_woken = True
        self._has_rights = True

    @property
    def left(self) -> float:
        """Seconds until its time-out."""
        return self._ends - self.event.time()

    def comes(self) -> bool:
        """Return whether it is this call's turn; the call keeps its position as long as it calls this method regularly."""
        self.event.clear()
        if self._has_come and monotonic() < self._renew_at:
            return True
        had_come, self._has_come = self._has_come, self._enter(self._queue)
        if self._has_come and not had_come and not self._was_woken:
            self._queues.missed()
        if self._has_come and self._place is not None:
            self._enter(self._place)
        self._renew_at = monotonic() + RENEW_EVERY
        return self._has_come

    def moves_to(self, rule: str | None) -> bool:
        """Queue for a place of a rule, or for none with `None`; return whether it is a new one, which may be free by now.

        For a rule that a policy has added since, the call is not woken, and polls.
        """
        place = None if rule is None else self._queues.of_places(self._parts).get(rule)
        before, self._place = self._place, place
        if place == before:
            return False
        if before is not None:
            self._queues.leave(before, self._ticket)
        if place is None:
            return False
        self._enter(place)
        return True

    def sleep(self, seconds: float = inf) -> None:
        """Sleep until this call is woken, or should check its turn again, for at most `seconds`."""
        queue, is_place = self._place or self._queue, self._place is not None
        pause = min(seconds, self.left, self._queues.pause(queue, is_place=is_place))
        self._was_woken = self.event.wait(max(0.0, pause))

    def rest(self, seconds: float) -> None:
        """Sleep for `seconds`, and keep the turn; return early to try again: units may have been given back."""
        self.event.wait(max(0.0, min(seconds, self._renew_at - monotonic())))

    def leave(self) -> None:
        """Leave all queues; the caller sets `event.is_over` before.

        If a server is down, the ticket stays there until it expires: an attempt would only delay the caller.
        """
        if not self._has_rights or (self._queues.is_remote and self._health.state == "unavailable"):
            return
        if self._place is not None:
            self._queues.leave(self._place, self._ticket)
        self._queues.leave(self._queue, self._ticket)

    def _enter(self, queue: object) -> bool:
        if not self._has_rights or self._health.state == "unavailable":
            return True
        try:
            return self._queues.enter(queue, self._ticket, self._priority)
        except StoreOverloaded:
            return self._has_come
        except StoreError as error:
            self._has_rights = not isinstance(error, StoreMisconfigured)
            return True
