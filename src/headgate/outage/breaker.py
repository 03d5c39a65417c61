"""The circuit breaker of a store.

Evidence that the store is down opens the breaker: a connection that fails, or a timeout of at least the store's own
deadline. While it is open, no call waits for the store. Probes run in the background, with or without callers. They prove
that the store can count, so the first successful one closes the breaker.

Three events are not evidence: a call whose own, shorter deadline passed, which only starts one probe with the store's
deadline; a call that this process could not send; and an error reply, because a store that replies is up.

Nothing here waits, so threads and tasks share it.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

from headgate._fork import watch
from headgate.errors import (
    HeadgateError,
    StoreConflict,
    StoreError,
    StoreOverloaded,
    StoreTimeout,
    StoreUnavailable,
)
from headgate.stores.memory import MemoryStore

logger = logging.getLogger("headgate")

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 0.5
"""Seconds between two probes; each pause is twice the previous one. A recovery is detected within a second."""

DEADLINE = 1.0
"""Seconds that a probe may take if the store has no deadline."""

GRACE = 1.0
"""Seconds after which an overdue probe is presumed lost: its event loop may be closed, or its process forked."""


class Probe(NamedTuple):
    """A probe that the caller has to schedule.

    Attributes:
        pause: Seconds until it is due.
        ticket: It is obsolete as soon as the breaker has another ticket.
    """

    pause: float
    ticket: int


class Breaker:
    """Decides whether calls go to a store; shared by all limiters on the store.

    Attributes:
        is_closed: Whether calls go to the store.
        has_worked: Whether a call has succeeded since the process started.
        is_well: Both.
        reason: The reason of the current or the last outage.
        outages: Number of outages.
        failures: Calls that waited for the store and failed, without probes.
        overloads: Calls that this process could not send in time.
        memory: Counts of limiters with the policy `local` during an outage. It belongs to the store, so that a limiter
            recreated during an outage continues with its counts and does not hand out its share again.
    """

    def __init__(self, store: object, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.is_closed = True
        self.has_worked = False
        self.is_well = False
        self.reason = ""
        self.outages = 0
        self.failures = 0
        self.overloads = 0
        self.memory = MemoryStore()
        self._name = repr(store)
        self._deadline: float = getattr(store, "deadline", DEADLINE)
        self._monotonic = monotonic
        self._lock = watch(threading.Lock())
        self._epoch = 0  # counts changes: results of calls from earlier epochs are ignored
        self._since = 0.0
        self._pause = FIRST_PAUSE
        self._probed_by = 0.0  # deadline of the scheduled probe
        self._is_stopped = False
        self._logged: set[type[HeadgateError]] = set()
        watch(self)

    @property
    def ticket(self) -> int:
        """A ticket for a probe, which calls the store even while the breaker is open."""
        return self._epoch

    def admit(self, charges: bool = True) -> int | None:
        """Return a ticket for a call to the store, or `None` if the breaker is open.

        If the scheduled probe was lost, one charging call is admitted instead.
        """
        if self.is_closed:
            return self._epoch
        with self._lock:
            now = self._monotonic()
            if self.is_closed:
                return self._epoch
            if not charges or now < self._probed_by:
                return None
            self._probed_by = now + self._pause
            self._epoch += 1
            return self._epoch

    def succeeded(self, ticket: int) -> None:
        """Record that the store has counted."""
        self.has_worked = True
        self._answered(ticket)

    def failed(
        self, ticket: int, error: HeadgateError, *, is_tight: bool = False, is_probe: bool = False
    ) -> Probe | None:
        """Record a failed call, and return the probe that the caller has to schedule, or `None`.

        Args:
            ticket: The ticket of the call.
            error: The error of the call.
            is_tight: Whether the call's deadline was shorter than the store's.
            is_probe: Whether the call was a probe.
        """
        if is_tight and isinstance(error, StoreTimeout):
            return self._suspect()
        if isinstance(error, StoreUnavailable):
            return self._open(ticket, str(error), is_probe)
        if isinstance(error, StoreOverloaded):
            self._count_overload(error)
        if type(error) in (StoreError, StoreOverloaded):  # the store may be up or down
            return self._next_probe(ticket) if is_probe else None
        self._answered(ticket)
        if isinstance(error, StoreConflict):
            self._log_once("%s; such calls are answered by policy, which is logged only once", error)
        return None

    def error(self) -> StoreUnavailable:
        """Return the error of a call that was not sent because the breaker is open."""
        return StoreUnavailable(f"not called, because it was unavailable a moment ago: {self.reason}")

    def stop(self) -> None:
        """End the probes, because the store was closed."""
        self._is_stopped = True

    def after_fork_in_child(self) -> None:
        """Admit the first call of the child, because the probes stayed in the parent."""
        self._probed_by = 0.0

    def _answered(self, ticket: int) -> None:
        """Record that the store has replied: it is up."""
        with self._lock:
            if ticket != self._epoch:
                return
            self.is_well = self.has_worked
            self._pause, self._probed_by = FIRST_PAUSE, 0.0
            if self.is_closed:
                return
            self.is_closed = True
            self._epoch += 1
            seconds = self._monotonic() - self._since
        logger.warning("%s is back after %.1f s", self._name, seconds)

    def _open(self, ticket: int, reason: str, is_probe: bool) -> Probe | None:
        """Record that the store is down."""
        with self._lock:
            self.failures += not is_probe
            if ticket != self._epoch:
                return None
            self._epoch += 1
            self.reason = reason
            if not self.is_closed:
                return self._probe_in(self._pause)
            self.is_closed = self.is_well = False
            self._since = self._monotonic()
            self.outages += 1
            probe = self._probe_in(self._pause)
        logger.warning(
            "%s is unavailable; until it is back, its limiters answer by their policies: %s",
            self._name,
            reason,
        )
        return probe

    def _suspect(self) -> Probe | None:
        """Return an immediate probe after a deadline shorter than the store's, unless one is in progress."""
        with self._lock:
            self.failures += 1
            is_needed = self.is_closed and self._monotonic() >= self._probed_by
            return self._probe_in(0) if is_needed else None

    def _next_probe(self, ticket: int) -> Probe | None:
        """Return the next probe after a probe without a result."""
        with self._lock:
            is_needed = not self.is_closed and ticket == self._epoch
            return self._probe_in(self._pause) if is_needed else None

    def _probe_in(self, pause: float) -> Probe | None:
        if self._is_stopped:
            return None
        if pause:
            self._pause = min(2 * pause, LONGEST_PAUSE)
        self._probed_by = self._monotonic() + pause + self._deadline + GRACE
        return Probe(pause, self._epoch)

    def _count_overload(self, error: StoreOverloaded) -> None:
        with self._lock:
            self.overloads += 1
        self._log_once(
            "overload: this process could not send a call in time; it is logged only once: %s", error
        )

    def _log_once(self, message: str, error: HeadgateError) -> None:
        if type(error) not in self._logged:
            self._logged.add(type(error))
            logger.warning(message, error)


_breakers: weakref.WeakKeyDictionary[object, Breaker] = weakref.WeakKeyDictionary()
_breakers_lock = watch(threading.Lock())


def breaker_of(store: object) -> Breaker:
    """Return the breaker of a store, so that an outage is detected once and not once per limiter."""
    with _breakers_lock:
        breaker = _breakers.get(store)
        if breaker is None:
            breaker = _breakers[store] = Breaker(store)
        return breaker
