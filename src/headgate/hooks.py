"""Hooks: callbacks of a limiter.

A hook is an object given to a limiter as `hooks=[...]`. It is called after a decision, so it cannot change the decision.
Its exceptions are logged once and suppressed. Hooks cost no time in a limiter without hooks.

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
"""The operation of a call. `move`: a hold was confirmed, or its lease renewed."""

SECONDS = (0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
"""Bounds of latency histograms, from a decision in memory to a store that is close to its deadline."""


class Call(NamedTuple):
    """The arguments of a call, passed to hooks.

    Attributes:
        limiter: The limiter's name; empty if it has none.
        operation: The operation.
        key: The key; `None` for a refund, which is identified by its receipt.
        cost: The cost, as a number or by unit; 0 for a reset.
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
        """Called once for every limiter (`Limiter` or `AsyncLimiter`) that is created with this hook."""

    def decided(self, call: Call, decision: Decision, seconds: float) -> None:
        """Called after a hit, a check, a hold or a move, with the decision and the seconds that the store took."""

    def completed(self, call: Call, seconds: float, degraded: bool) -> None:
        """Called after units were recorded, refunded or reset, with the seconds that the store took.

        `degraded` is true for a record if the store could not be reached, so the units may not be counted. It is always
        false for a refund; units that could not be given back are counted until they expire.
        """

    def settled(self, call: Call, cost: Cost | None) -> None:
        """Called at the end of a hold, with its final cost; `None` if it was never settled and its full cost counts."""

    def failed(self, call: Call, error: Exception, seconds: float) -> None:
        """Called when a call raised an exception, with the seconds that it took."""


class Hooks:
    """Calls several hooks, and never raises."""

    def __init__(self, hooks: Iterable[Hook]) -> None:
        self._hooks = check_list("hooks=", hooks, Hook, "[LogHook()], of objects of subclasses of Hook")
        self._reported: set[int] = set()
        self._lock = watch(threading.Lock())
        self.attached = self._caller("attached")
        self.decided = self._caller("decided")
        self.completed = self._caller("completed")
        self.settled = self._caller("settled")
        self.failed = self._caller("failed")

    @contextmanager
    def watch(self, call: Call) -> Iterator[Callable[[], float]]:
        """Call the `failed` hooks if the block raises; yield a function that returns the seconds since its start."""
        start = perf_counter()
        try:
            yield lambda: perf_counter() - start
        except Exception as error:  # not for a cancelled call, which neither succeeded nor failed
            self.failed(call, error, perf_counter() - start)
            raise

    def _caller(self, event: str) -> Callable[..., None]:
        """Return a function that calls the hooks that override the method of an event."""
        listeners = [
            getattr(hook, event)
            for hook in self._hooks
            if getattr(type(hook), event, None) is not getattr(Hook, event)
        ]

        def call(*args: object) -> None:
            for listener in listeners:
                try:
                    listener(*args)
                except Exception as error:  # noqa: BLE001  # an error in a hook must not affect the decision
                    self._report(listener, event, error)

        return call

    def _report(self, listener: Callable[..., None], event: str, error: Exception) -> None:
        hook = getattr(listener, "__self__", listener)
        with self._lock:
            if id(hook) in self._reported:
                return
            self._reported.add(id(hook))
        logger.error(
            "hook %r failed in %s(); further errors of this hook are not logged",
            hook,
            event,
            exc_info=error,
        )
