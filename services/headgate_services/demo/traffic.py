"""Traffic that can be switched on and off: callers that repeat a request at a given rate."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import httpx

_AFTER_A_FAILURE = 2.0  # seconds until a caller without an answer calls again


@dataclass(frozen=True, slots=True)
class Caller:
    """A request that is repeated at a given rate.

    Attributes:
        name: The name of the caller.
        per_second: Average number of calls per second if calls took no time.
        call: Sends the request; raises `httpx.HTTPError` without an answer.
    """

    name: str
    per_second: float
    call: Callable[[], Awaitable[None]]


class DemoTraffic:
    """Callers that call while it is on. A caller waits for one answer before calling again, so that load is bounded.

    Attributes:
        on: Whether they call; may be set at any time, from the event loop that they run in.
    """

    def __init__(self, callers: Sequence[Caller], *, on: bool) -> None:
        self._callers = callers
        self._switch = asyncio.Event()
        self._random = random.Random()
        self.on = on

    @property
    def on(self) -> bool:
        return self._switch.is_set()

    @on.setter
    def on(self, value: bool) -> None:
        if value:
            self._switch.set()
        else:
            self._switch.clear()

    async def run(self) -> None:
        """Run the callers until cancelled."""
        async with asyncio.TaskGroup() as group:
            for caller in self._callers:
                group.create_task(self._repeat(caller), name=caller.name)

    async def _repeat(self, caller: Caller) -> None:
        while True:
            await asyncio.sleep(self._random.expovariate(caller.per_second))
            await self._switch.wait()
            try:
                await caller.call()
            except httpx.HTTPError:
                await asyncio.sleep(_AFTER_A_FAILURE)
