"""A simulated process: its store, its limiters, and the actors that call them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from random import Random
from typing import Any

from headgate import AsyncLimiter, Limiter, StoreError
from headgate.client import ServerStore
from tests.faults.actor import Actor
from tests.faults.recording import Event, Recorder
from tests.faults.traffic import Subject
from tests.simulation.timeline import Process

DEADLINE = 1.0
"""The deadline of all calls, in seconds."""


@dataclass(frozen=True)
class Plan:
    """Parameters of the processes of one run.

    Attributes:
        actors: The number of actors of each process.
        calls: The number of calls of each actor.
        cancels: The share of calls that are cancelled.
        max_pause: The longest pause between two calls, in seconds.
        policy: The failure policy.
        bursts: The upper bound of the number of calls in a burst; 0 for no bursts.
        resets: The share of calls that reset a key.
        exits: Whether processes shut down cleanly in the middle of their calls.
    """

    actors: int
    calls: int
    cancels: float
    max_pause: float
    policy: str
    bursts: int
    resets: float
    exits: bool


class Program:
    """A simulated process, the `Host` of its actors.

    Attributes:
        number: Its number as a worker in the history.
        events: The recorded events.
        errors: Start, end, error and reason of each failed call.
        is_done: Whether it ended or was killed.
    """

    waits = 0.1
    quotas = True

    def __init__(
        self,
        timeline: Any,
        process: Process,
        number: int,
        store: Any,
        subjects: dict[str, Subject],
        plan: Plan,
        now: Callable[[], int],
    ) -> None:
        self.process = process
        self.number = number
        self.store = store
        self.subjects = subjects
        self.now = now
        self.events: list[Event] = []
        self.recorder = Recorder(self.events.append)
        self.errors: list[tuple[int, int, str, str]] = []
        self.calls: dict[asyncio.Future[Any], None] = {}
        self.policy = plan.policy
        self.resets = plan.resets
        self.exits = plan.exits
        self.in_tasks = not hasattr(timeline, "interruptible")
        self.is_certain = plan.policy == "raise" and not isinstance(store, ServerStore)
        self.is_done = False
        self._plan = plan
        self._timeline = timeline
        self._random = Random(timeline.rng.random())
        self._left = plan.actors * plan.calls
        self._running = plan.actors
        self.limiters: dict[str, Any] = {}
        self.reload(others=False)

    def reload(self, *, others: bool) -> None:
        """Create the limiters, with changed limits if `others`."""
        kind = AsyncLimiter if self.in_tasks else Limiter
        self.limiters = {
            name: kind(
                *(subject.others if others else subject.rules),
                name=name,
                store=self.store,
                on_store_error=self.policy,  # type: ignore[arg-type]
            )
            for name, subject in self.subjects.items()
        }

    def start(self) -> None:
        """Start all actors."""
        for _ in range(self._plan.actors):
            self._timeline.start(self.process, self._act)
        if self.exits:
            self._timeline.start(self.process, self._exit)

    async def _act(self) -> None:
        try:
            await SimulatedActor(self, Random(self._random.random()), self._plan.bursts).run()
        finally:
            self._running -= 1
            self.is_done = not self._running

    async def _exit(self) -> None:
        """Shut down in the middle of the calls: cancel them, and close the store."""
        await asyncio.sleep(self._random.random() * self._plan.calls * max(self._plan.max_pause, 0.001))
        self._left = 0
        for _ in range(2):  # the calls of a burst may start one turn later
            for call in list(self.calls):
                call.cancel()
            await asyncio.sleep(0)
        await self.store.aclose()

    async def close(self) -> None:
        """Close the store."""
        if self.in_tasks:
            await self.store.aclose()
        else:
            self.store.close()

    def is_over(self) -> bool:
        """Count a call, and return whether actors must stop instead of making it."""
        self._left -= 1
        return self._left < 0

    def pick_key(self, rng: Random) -> str:
        """Return a key that all processes share, or a private key of this process."""
        return rng.choice(("a", "a", "b", f"p{self.number}"))

    def key(self, name: str) -> str:
        """Return the name itself."""
        return name

    def cancels(self, operation: str) -> float:
        """Return the share of calls that are cancelled."""
        return self._plan.cancels

    def interruptible(self) -> AbstractContextManager[object]:
        """Allow interruptions in a thread."""
        return contextlib.nullcontext() if self.in_tasks else self._timeline.interruptible()

    async def rest(self, rng: Random) -> None:
        """Wait between two calls."""
        if rng.random() < 0.7:
            await self._timeline.sleep(rng.random() * self._plan.max_pause)

    async def fail(self, operation: str, start: int, error: StoreError) -> None:
        """Record a failed call, and wait briefly."""
        self.errors.append((start, self.now(), type(error).__name__, f"{operation}: {error}"))
        await self._timeline.sleep(0.003)


class SimulatedActor(Actor):
    """An actor that sometimes makes several calls concurrently."""

    def __init__(self, program: Program, rng: Random, bursts: int) -> None:
        super().__init__(program, rng)
        self._bursts = bursts if program.in_tasks else 0

    async def decide(self) -> None:
        if self._bursts and self._random.random() < 0.1:
            times = self._random.randrange(2, self._bursts)
            await asyncio.gather(*(super(SimulatedActor, self).decide() for _ in range(times)))
        else:
            await super().decide()
