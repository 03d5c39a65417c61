"""Messages of a server to the waiters of this process, received by one thread on one connection."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from headgate._fork import watch
from headgate.errors import StoreUnavailable
from headgate.stores.queues import WakeUps

logger = logging.getLogger("headgate")

LINGER = 30.0
"""Seconds without a waiter after which the connection is closed."""

RETRY_AFTER = 1.0
"""Seconds before the next attempt to connect; doubled after each failure, up to `LONGEST_PAUSE`."""

LONGEST_PAUSE = 30.0
"""Seconds."""

CHECK_EVERY = 1.0
"""Seconds after which the thread checks whether it is still needed."""


class Subscription(Protocol):
    """A connection on which the server sends messages to this process."""

    def receive(self, seconds: float) -> Sequence[str]:
        """Return the tickets in the messages that arrive within `seconds`; it returns when there is one.

        Raises:
            StoreError: The connection is lost.
        """

    def close(self) -> None:
        """Close the connection."""


class WakeListener(WakeUps):
    """The sleeping waiters of this process, woken by messages of the server.

    The thread starts with the first sleeping waiter. If it cannot connect, or if messages do not arrive, as behind some
    poolers, `works` is false, and the waiters call the store more often. If messages stop arriving, it connects again:
    a server that loses power does not close its connections.

    Args:
        subscribe: Opens a connection that receives the messages for a process.
    """

    def __init__(self, subscribe: Callable[[str], Subscription]) -> None:
        self._subscribe = subscribe
        self._is_closed = False
        self._lock = watch(threading.Lock())
        self._thread: threading.Thread | None = None
        super().__init__()

    def listen(self) -> None:
        with self._lock:
            if self._thread is not None or self._is_closed:
                return
            thread = threading.Thread(target=self._listen, name="headgate-listener", daemon=True)
            with suppress(RuntimeError):  # no thread can be started; the waiters call the store more often
                thread.start()
                self._thread = thread

    def close(self) -> None:
        """Close the connection soon."""
        self._is_closed = True

    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        self._thread = None

    def _listen(self) -> None:
        process, used = self.process, time.monotonic()
        subscription: Subscription | None = None
        pause, has_received = RETRY_AFTER, False
        while self._is_needed(used):
            if self._events:
                used = time.monotonic()
            try:
                if subscription is None:
                    subscription, has_received = self._subscribe(process), False
                pause = RETRY_AFTER
                tickets = subscription.receive(CHECK_EVERY)
                for ticket in tickets:
                    self.works = has_received = True
                    self.wake(ticket)
                if has_received and not tickets and not self.works:
                    raise StoreUnavailable("messages no longer arrive")
            except Exception as error:  # noqa: BLE001 - a driver's defect must not end this thread
                logger.info("waiting calls poll their store, because it cannot wake them: %s", error)
                self.works = False
                if subscription is not None:
                    subscription.close()
                    subscription = None
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        if subscription is not None:
            subscription.close()

    def _is_needed(self, used: float) -> bool:
        """Return whether the thread continues; `used` is the last time at which a waiter slept."""
        with self._lock:
            if not self._is_closed and (self._events or time.monotonic() - used < LINGER):
                return True
            self._thread, self.works = None, False
            return False
