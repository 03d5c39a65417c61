"""Outages of a database: one time-out for all requests, and back within a second of the database.

A request that fails starts a probe, which asks the database on a connection of its own. Only if that fails as well is the
database down. Then no request waits for it any more; probes go on in the background until one has an answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

from headgate import StoreError, StoreTimeout
from headgate.outage import AsyncCircuit, Breaker


class Outages:
    """Keeps track of whether a database is down.

    Args:
        name: What the log calls it.
        deadline: Seconds that a probe may take.
        probe: Asks the database; raises `StoreUnavailable` if there is no answer.
    """

    def __init__(self, name: str, deadline: float, probe: Callable[[], Awaitable[None]]) -> None:
        self.deadline = deadline
        self._name = name
        self._breaker = Breaker(self)
        self._circuit = AsyncCircuit(self._breaker, probe, is_tight=True)

    def __repr__(self) -> str:
        return self._name

    @property
    def is_down(self) -> bool:
        """Whether it was asked and did not answer; probes go on."""
        return not self._breaker.is_closed

    async def report(self, error: Exception) -> None:
        """Have a probe find out whether the database is down, because a request has failed."""

        async def fail() -> None:
            raise StoreTimeout(str(error)) from error

        with suppress(StoreError):  # what was raised is the caller's to raise
            await self._circuit.call(False, fail)

    def stop(self) -> None:
        """End the probes."""
        self._breaker.stop()
