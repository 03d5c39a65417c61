"""Detect outages of a database: requests fail at once while it is down, and work within a second of its return.

A request that fails starts a probe, which queries the database on a separate connection. If the probe fails too, the
database is down: requests fail without waiting, and probes continue in the background until one succeeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from headgate import StoreError, StoreTimeout
from headgate.outage import AsyncCircuit, Breaker


class Outages:
    """State of a database: up or down.

    Args:
        name: The name in the log.
        deadline: Seconds that a probe may take.
        probe: Function that queries the database, and raises `StoreUnavailable` if that fails.
    """

    def __init__(self, name: str, deadline: float, probe: Callable[[], Awaitable[None]]) -> None:
        self.deadline = deadline
        self._name = name
        self._breaker = Breaker(self)
        self._probe = probe
        self._probes: set[asyncio.Task[object] | None] = set()
        self._is_closed = False
        self._circuit = AsyncCircuit(self._breaker, self._run_probe, is_tight=True)

    def __repr__(self) -> str:
        return self._name

    @property
    def is_down(self) -> bool:
        """Whether the database is down; probes continue until it replies."""
        return not self._breaker.is_closed

    async def report(self, error: Exception) -> None:
        """Start a probe, because a request failed."""

        async def fail() -> None:
            raise StoreTimeout(str(error)) from error

        with suppress(StoreError):  # the caller raises the original error
            await self._circuit.call(False, fail)

    async def aclose(self) -> None:
        """Cancel the probes, and wait until they have closed their connections.

        The end of the event loop would cancel the task that closes a connection as well, and leave it open.
        """
        self._is_closed = True
        self._breaker.stop()
        probes = [task for task in self._probes if task is not None]
        for task in probes:
            task.cancel()
        await asyncio.gather(*probes, return_exceptions=True)

    async def _run_probe(self) -> None:
        if self._is_closed:
            raise StoreError("the database was closed")
        task = asyncio.current_task()
        self._probes.add(task)
        try:
            await self._probe()
        finally:
            self._probes.discard(task)
