"""Hooks: callbacks for what a limiter does.

A hook is an object given to a limiter as `hooks=[...]`. It is called afterwards, so it cannot change a decision; what it
raises is logged once and goes no further, so it cannot break one either. A limiter without hooks pays nothing for them.

Hooks are called inline, on the thread or in the task of the caller, possibly on several threads at once. They should be
quick and must not block.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Literal, NamedTuple

from headgate._checks import check_list
from headgate._fork import watch
from headgate.costs import Cost
from headgate.decision import Decision
from headgate.keys import Key

logger = logging.getLogger("headgate")

Operation = Literal["hit", "check", "hold", "move", "record", "refund", "reset"]
"""The operation that was asked. `move`: a hold was confirmed, or its lease renewed."""

SECONDS = (0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
"""Bounds of latency histograms: from a decision in memory to a store that is about to time out."""


class Call(NamedTuple):
    """The arguments of a call, as hooks get them.

    Attributes:
        limiter: The limiter's name; empty if it has none.
        operation: What was asked of the store.
        key: Whose units; `None` for a refund, which finds them by its receipt.
        cost: How many units, of everything or by unit; 0 for a reset.
        tier: The caller's tier.
    """

    limiter: str
    operation: Operation
    key: Key | None
    cost: Cost
    tier: str | None


class Hook:
    """Base class of hooks: subclass it and override the methods that you need; the others do nothing."""

    def attached(self, limiter: Any) -> None:
        """Called once for every limiter (`Limiter` or `AsyncLimiter`) that is made with this hook."""

    def decided(self, call: Call, decision: Decision, seconds: float) -> None:
        """Called after a hit, a check, a hold or a move, with the decision and the seconds that the store took."""

    def completed(self, call: Call, seconds: float, degraded: bool) -> None:
        """Called after units were recorded, refunded or reset, with the seconds that the store took.

        `degraded` says of a record that the store could not be asked, so that the units may not be counted. Of a refund
        that is not known: units that could not be given back stay counted until they expire.
        """

    def settled(self, call: Call, cost: Cost | None) -> None:
        """Called when a hold has ended, with its final cost; `None` if it was never settled and counts as it was taken."""

    def failed(self, call: Call, error: Exception, seconds: float) -> None:
        """Called when a call raised an exception, with the seconds that it took."""


class Hooks:
    """Several hooks as one that never raises."""

    def __init__(self, hooks: Iterable[Hook]) -> None:
        self._hooks = check_list("hooks=", hooks, Hook, "[LogHook()], of objects of subclasses of Hook")
        self._reported: set[int] = set()
        self._lock = watch(threading.Lock())
        self.attached = self._teller("attached")
        self.decided = self._teller("decided")
        self.completed = self._teller("completed")
        self.settled = self._teller("settled")
        self.failed = self._teller("failed")

    @contextmanager
    def watch(self, call: Call) -> Iterator[Callable[[], float]]:
        """Yield what returns the seconds since the beginning of a block that makes a call; tell hooks if it raises."""
        start = perf_counter()
        try:
            yield lambda: perf_counter() - start
        except Exception as error:  # a cancelled call has neither answered nor failed
            self.failed(call, error, perf_counter() - start)
            raise

    def _teller(self, event: str) -> Callable[..., None]:
        """Return a function that tells an event to the hooks that have an ear for it."""
        listeners = [
            getattr(hook, event)
            for hook in self._hooks
            if getattr(type(hook), event, None) is not getattr(Hook, event)
        ]

        def tell(*args: object) -> None:
            for listener in listeners:
                try:
                    listener(*args)
                except Exception as error:  # noqa: BLE001  # whatever a hook does must not reach the decision
                    self._report(listener, event, error)

        return tell

    def _report(self, listener: Callable[..., None], event: str, error: Exception) -> None:
        hook = getattr(listener, "__self__", listener)
        with self._lock:
            if id(hook) in self._reported:
                return
            self._reported.add(id(hook))
        logger.error(
            "hook %r failed when %s; decisions go on, and this is not logged again",
            hook,
            event,
            exc_info=error,
        )
