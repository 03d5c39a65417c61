"""Whether a store is worth asking.

The breaker of a store is opened by evidence that the store is down: a connection that fails, or a time-out of at least the
store's own deadline. While it is open no call waits for the store. Probes find out when it is back; they run in the
background, with or without callers, and prove that the store can count, so the first one that succeeds closes the breaker.

Three things are no evidence. A call whose own, tighter deadline passed: it only makes the store suspect, which is
answered by one probe with the store's deadline. A call that this process could not send. And a store that answers with an
error, for it is there.

Nothing here waits, so threads and tasks share it.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable

from headgate._fork import watch
from headgate.errors import StoreError, StoreOverloaded, StoreUnavailable
from headgate.stores.memory import MemoryStore

logger = logging.getLogger("headgate")

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 0.5
"""Seconds between two probes; each pause is twice the one before. A store that is back is noticed within a second."""

DEADLINE = 1.0
"""Seconds that a probe may take if the store has no deadline."""

GRACE = 1.0
"""Seconds after which a probe that should have ended is not waited for: its event loop or its process may be gone."""

OVERLOAD_LOG_PAUSE = 10.0
"""Seconds between two lines in the log that this process is overloaded."""


class Breaker:
    """Whether a store is worth asking; shared by all limiters on it.

    Attributes:
        is_closed: Whether calls go to the store.
        has_worked: Whether the store has counted anything since the process began.
        is_well: Both.
        reason: Why it is open, or was the last time.
        outages: How often the store has become unavailable.
        failures: How many calls had to wait for the store before it failed them, without probes.
        overloads: How many calls this process could not send in time.
        memory: Where limiters count that limit locally meanwhile. It is the store's, so that a limiter made anew in an
            outage goes on with what was counted, and does not hand out its share again.
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
        self._prober = 0  # the number of the prober whose turn it is; an earlier one ends
        self._probed_by = 0.0  # when the probe under way has reported
        self._suspect_until = 0.0
        self._is_stopped = False
        self._has_reported = False
        self._next_overload_log = 0.0
        watch(self)

    @property
    def ticket(self) -> int:
        """A ticket for a probe, which asks the store even while the breaker is open."""
        return self._epoch

    def admit(self, charges: bool = True) -> int | None:
        """Return a ticket to ask the store with, or `None` if it is not worth asking.

        If there is no probe any more (the event loop was closed, the process forked), one charging call is let through.
        """
        if self.is_closed:
            return self._epoch
        with self._lock:
            now = self._monotonic()
            if self.is_closed or (charges and now >= self._probed_by):
                self._probed_by = now + self._pause
                return self._epoch
        return None

    def succeeded(self, ticket: int) -> None:
        """Take note that the store has counted."""
        self.has_worked = True
        self.answered(ticket)

    def answered(self, ticket: int) -> None:
        """Take note that the store has answered, be it with an error: it is there."""
        with self._lock:
            if ticket != self._epoch:
                return
            self.is_well = self.has_worked
            self._pause = FIRST_PAUSE
            if self.is_closed:
                return
            self.is_closed = True
            self._epoch += 1
            seconds = self._monotonic() - self._since
        logger.warning("%s is back after %.1f s", self._name, seconds)

    def failed(self, ticket: int, error: StoreUnavailable, *, is_probe: bool = False) -> int | None:
        """Take note that the store is down; return the number of the prober that the caller has to start, if any."""
        with self._lock:
            self.failures += not is_probe
            if ticket != self._epoch:
                return None
            self.reason = reason = str(error)
            self._prober = prober = self._prober + 1
            if not self.is_closed:
                return prober
            self.is_closed = self.is_well = False
            self._epoch += 1
            self._since = self._monotonic()
            self._probed_by = self._since + self._deadline  # until then somebody begins to probe
            self.outages += 1
        logger.warning(
            "%s is unavailable; until it is back, its limiters answer by their policies: %s",
            self._name,
            reason,
        )
        return prober

    def suspected(self) -> bool:
        """Take note that a deadline passed that is shorter than the store's; return whether the caller has to probe."""
        with self._lock:
            self.failures += 1
            now = self._monotonic()
            if not self.is_closed or now < self._suspect_until or self._is_stopped:
                return False
            self._suspect_until = now + self._deadline + FIRST_PAUSE
            return True

    def next_probe(self, prober: int) -> float | None:
        """Return the seconds until a prober has to probe; `None` if it has nothing to do any more."""
        with self._lock:
            if self.is_closed or self._is_stopped or prober != self._prober:
                return None
            pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
            self._probed_by = self._monotonic() + pause + self._deadline + GRACE
            return pause

    def overloaded(self, error: StoreOverloaded) -> None:
        """Take note that this process could not send a call in time."""
        with self._lock:
            self.overloads += 1
            now = self._monotonic()
            if now < self._next_overload_log:
                return
            self._next_overload_log = now + OVERLOAD_LOG_PAUSE
            count = self.overloads
        logger.warning(
            "overload: this process could not send %d calls to %s in time so far: %s",
            count,
            self._name,
            error,
        )

    def report(self, error: StoreError) -> None:
        """Log, the first time, that the store is there but something is wrong with what it holds."""
        with self._lock:
            if self._has_reported:
                return
            self._has_reported = True
        logger.warning("%s; such calls are answered by policy, which is logged only once", error)

    def error(self) -> StoreUnavailable:
        """Return the error of a call that the store was not asked for."""
        return StoreUnavailable(f"not asked, because it was unavailable a moment ago: {self.reason}")

    def stop(self) -> None:
        """Let probes end: the store was closed."""
        self._is_stopped = True

    def after_fork_in_child(self) -> None:
        """Let the first call of the child find out by itself; the prober stayed in the parent."""
        self._probed_by = 0.0


_breakers: weakref.WeakKeyDictionary[object, Breaker] = weakref.WeakKeyDictionary()
_breakers_lock = watch(threading.Lock())


def breaker_of(store: object) -> Breaker:
    """Return the breaker of a store, so that an outage is found out once and not once per limiter."""
    with _breakers_lock:
        breaker = _breakers.get(store)
        if breaker is None:
            breaker = _breakers[store] = Breaker(store)
        return breaker


def stop_probes(store: object) -> None:
    """Let the probes of a store end, because it was closed."""
    breaker = _breakers.get(store)
    if breaker is not None:
        breaker.stop()
