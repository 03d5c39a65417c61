"""A process that calls limiters and records the calls: `python -m tests.faults.worker '{"url": ...}'`."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import logging
import os
import random
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Any

from headgate import AsyncLimiter, CostTooHigh, Limiter, MemoryStore, StoreError, local
from headgate.clock import WallClock
from headgate.decision import Decision
from headgate.stores import open_store
from tests.faults.actor import Actor, Interrupted, run_at_once
from tests.faults.broken import BrokenStore
from tests.faults.recording import Recorder, file_writer
from tests.faults.traffic import subjects

_wall_ns = time.time_ns  # before the clock of this process is skewed
by_remaining, by_limit = attrgetter("remaining"), attrgetter("limit")
SHARED_KEYS = 2
PAUSE = 0.003
TICK_US = 20
FIRST_TICK_US = 1_700_000_000_000_000
KEY_LIFE_US = 3_000_000
"""Time after which workers switch to new keys, because unknown outcomes widen the bounds of the old keys."""
OTHERS_CANCELLED = 500
"""One in this many calls other than holds and renewals is cancelled."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The arguments of a worker.

    Attributes:
        url: The store.
        history: The file to write the history to.
        seed: The seed of its random choices.
        scale: The scale of the limits.
        tasks: Whether actors are tasks rather than threads.
        actors: The number of actors.
        calls: The number of calls after which it ends; 0 for no limit.
        over: Path of a file; the worker ends when the file exists.
        options: Arguments of the store.
        policy: The failure policy of the limiters.
        skew_us: The error of this process's clock.
        quotas: Whether calls may pass the argument `quota`.
        cancels: One in this many holds and renewals in tasks is cancelled.
        interrupts: Whether a signal handler raises exceptions in the main thread.
        full_disk: Whether this process sometimes cannot write to files.
        broken: The name of a seeded bug in a memory store; empty for none.
        burst: The largest number of hits in a burst; 1 for no bursts.
        deadline: The deadline of calls to a remote store, in seconds; `None` for the default.
    """

    url: str
    history: str
    seed: int
    scale: int = 1
    tasks: bool = False
    actors: int = 2
    calls: int = 0
    over: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    policy: str = "raise"
    skew_us: int = 0
    quotas: bool = True
    cancels: int = 50
    interrupts: bool = False
    full_disk: bool = False
    broken: str = ""
    burst: int = 1
    deadline: float | None = None


class TickingClock(WallClock):
    """A clock that advances by a tick on every reading, so that times do not depend on the machine."""

    def __init__(self) -> None:
        self.now_us = count(FIRST_TICK_US, TICK_US).__next__  # type: ignore[method-assign]


class Interrupter:
    """Raises in the main thread at random moments of library calls, and never elsewhere."""

    def __init__(self) -> None:
        self._is_armed = False

    def start(self, rng: random.Random) -> None:
        """Start to interrupt at random intervals."""
        signal.signal(signal.SIGALRM, self._interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.01, rng.uniform(0.005, 0.05))

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Allow interruptions in a block of the main thread."""
        is_main = threading.current_thread() is threading.main_thread()
        try:
            self._is_armed = self._is_armed or is_main
            yield
        finally:
            self._is_armed = self._is_armed and not is_main

    def _interrupt(self, *_: object) -> None:
        if self._is_armed:
            self._is_armed = False
            raise Interrupted


class BurstActor(Actor):
    """An actor that may make bursts of hits on one key, and records equal outcomes as one call."""

    def __init__(self, worker: Worker, number: int) -> None:
        super().__init__(worker, random.Random(worker.config.seed * 1000 + number))
        self._worker = worker

    async def _make(self, operation: str, name: str, key: str, units: int, call: Callable[[], Any]) -> None:
        burst = self._worker.config.burst
        if operation == "hit" and burst > 1:
            await self._burst(name, key, units, call, self._random.randint(2, burst))
        else:
            await super()._make(operation, name, key, units, call)

    async def _burst(self, name: str, key: str, cost: int, hit: Callable[[], Any], times: int) -> None:
        worker, recorder = self._worker, self._worker.recorder
        start = worker.now()
        number = recorder.begin("hits", name, key, cost * times, start, times=times)
        decisions, errors = await self._answers(hit, times)
        end = worker.now()
        admitted, refused, unknown = list[Decision](), list[Decision](), list[Decision]()
        for decision in decisions:
            (unknown if decision.degraded else admitted if decision.allowed else refused).append(decision)
        admitted.sort(key=by_remaining)
        for made, outcome, some in (
            ("hit", "admitted", admitted[:1]),
            ("hit", "admitted", admitted[1:][-1:]),
            ("hits", "admitted", sorted(admitted[1:-1], key=by_limit)),
            ("hit", "refused", refused),
        ):
            if some:
                units = cost * len(some) if made == "hits" else cost
                one = recorder.begin(made, name, key, units, start, times=len(some))
                recorder.finish(one, outcome, end, some[-1].fields)
        unclear = len(unknown) + sum(not isinstance(error, CostTooHigh) for error in errors)
        recorder.lower(number, cost * unclear, unclear)
        recorder.finish(number, "unknown" if unclear else "nothing", end)
        if unclear:
            await worker.pause()

    async def _answers(self, hit: Callable[[], Any], times: int) -> tuple[list[Decision], list[Any]]:
        """Make hits, concurrently in tasks of a remote store, else one by one; return their decisions and errors.

        One by one, it stops at the first error and after a second, because the checker limits the duration of the burst.
        """
        worker, due = self._worker, time.monotonic() + 1
        decisions: list[Decision] = []
        errors: list[Any] = []
        if worker.in_tasks and worker.store.remote:
            answers = await asyncio.gather(*(hit() for _ in range(times)), return_exceptions=True)
            decisions = [answer for answer in answers if isinstance(answer, Decision)]
            errors = [answer for answer in answers if not isinstance(answer, Decision)]
        else:
            try:
                with worker.interruptible():
                    for number in range(times):
                        answer = hit()
                        decisions.append(await answer if worker.in_tasks else answer)
                        if number % 8 == 7 and time.monotonic() > due:
                            break
            except (Interrupted, StoreError, CostTooHigh) as cause:
                errors = [cause]
        for error in errors:
            if not isinstance(error, Interrupted | StoreError | CostTooHigh):
                raise error
            worker.errors[type(error).__name__] += 1
        return decisions, errors


class Worker:
    """The `Host` of the actors in a worker process."""

    waits = 0.0
    resets = 0.002
    exits = False

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.subjects = subjects(config.scale)
        self.recorder = Recorder(file_writer(Path(config.history)))
        self.errors: Counter[str] = Counter()
        self.in_tasks = config.tasks
        self.policy = config.policy
        # Only the policy "raise" reports a failed settlement; a Headgate server does not report failures of its store.
        self.is_certain = config.policy == "raise" and not config.url.startswith("http")
        self.quotas = config.quotas
        self.calls: dict[asyncio.Future[Any], None] = {}
        self.store: Any = open_worker_store(config)
        # A store in memory has its own clock; all others use the wall clock of the machine.
        self._is_memory = config.url == "memory://"
        self.now: Callable[[], int] = (
            self.store.clock.now_us if self._is_memory else lambda: _wall_ns() // 1000
        )
        self.limiters: dict[str, Any] = {}
        self._interrupter = Interrupter()
        self.interruptible = self._interrupter.interruptible
        self._random = random.Random(config.seed)
        self._over = False
        self._made = 0
        self._filler = threading.Thread(target=self._fill_disk)

    def run(self) -> None:
        """Make all calls, and close the store."""
        try:
            self._run()
        finally:
            self._over = True
            if self.config.full_disk:
                self._filler.join()

    def _run(self) -> None:
        config = self.config
        if config.skew_us:
            skew_clock(config.skew_us)
        if config.full_disk:
            self._filler.start()
        if config.tasks:
            asyncio.run(self._run_tasks())
            return
        self.limiters = self._make_limiters(Limiter)
        threads = [
            threading.Thread(target=run_at_once, args=(partial(self._act, i),))
            for i in range(1, config.actors)
        ]
        for thread in threads:
            thread.start()
        if config.interrupts:
            self._interrupter.start(self._random)
        try:
            run_at_once(partial(self._act, 0))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._over = True
        for thread in threads:
            thread.join()
        self.store.close()

    async def _run_tasks(self) -> None:
        self.limiters = self._make_limiters(AsyncLimiter)
        async with asyncio.TaskGroup() as group:
            for i in range(self.config.actors):
                group.create_task(self._act(i))
        await self.store.aclose()

    def _make_limiters(self, kind: Callable[..., Any]) -> dict[str, Any]:
        policy: Any = local(0.25) if self.config.policy == "local" else self.config.policy
        return {
            name: kind(
                *subject.rules,
                name=name,
                store=self.store,
                on_store_error=policy if self.store.remote else None,
                deadline=self.config.deadline if self.store.remote else None,
            )
            for name, subject in self.subjects.items()
        }

    async def _act(self, number: int) -> None:
        """Run one actor, release its holds, and make a call that shows whether their places are free."""
        actor = BurstActor(self, number)
        await actor.run()
        await actor.give_back()
        key = self._own_key()
        for name, subject in self.subjects.items():
            if subject.has_places:
                check = partial(self.limiters[name].check, subject.key(self.key(key)), 1)
                await actor.call("check", name, key, 1, check)

    def pick_key(self, rng: random.Random) -> str:
        """Return the name of a key that all workers share, or of a private key."""
        if rng.random() < 0.3:
            return self._own_key()
        name = f"k{self.now() // KEY_LIFE_US}-{rng.randrange(SHARED_KEYS)}"
        return f"{self._name}-{name}" if self._is_memory else name

    def _own_key(self) -> str:
        return f"{self._name}-{self.now() // KEY_LIFE_US}"

    @property
    def _name(self) -> str:
        return f"w{Path(self.config.history).stem}"

    def key(self, name: str) -> str:
        """Return the key in the store for a name. Each round has different keys, because old counts may remain."""
        return f"{Path(self.config.history).parent.name} {name}"

    def cancels(self, operation: str) -> float:
        """Return the share of calls that are cancelled."""
        return 1 / (self.config.cancels if operation in ("hold", "renew") else OTHERS_CANCELLED)

    async def rest(self, rng: random.Random) -> None:
        """Yield to other tasks after a quarter of the calls."""
        if self.in_tasks and rng.random() < 0.25:
            await asyncio.sleep(0)

    async def fail(self, operation: str, start: int, error: StoreError) -> None:
        """Count an error of the store, and wait briefly."""
        self.errors[type(error).__name__] += 1
        await self.pause()

    def is_over(self) -> bool:
        """Return whether actors must stop."""
        self._made += 1
        is_late = self._made % 16 == 0 and os.path.exists(self.config.over)  # noqa: PTH110  # faster than pathlib
        is_done = 0 < self.config.calls <= self._made
        self._over = self._over or is_late or is_done
        return self._over

    async def pause(self) -> None:
        """Wait briefly: calls of a store that is down fail at once, and would fill the history."""
        if self.config.tasks:
            await asyncio.sleep(PAUSE)
        elif self.store.remote:
            time.sleep(PAUSE)  # noqa: ASYNC251  # in a thread

    def _fill_disk(self) -> None:
        """Forbid writing to files at random times."""
        while not self._over:
            time.sleep(self._random.uniform(0.1, 0.6))
            usual = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, usual[1]))
            time.sleep(self._random.uniform(0.01, 0.1))
            resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def open_worker_store(config: WorkerConfig) -> Any:
    """Return the store of a worker."""
    if config.url == "memory://":
        store = MemoryStore(clock=TickingClock())
        return BrokenStore(config.broken, store) if config.broken else store
    if config.url.startswith("postgres"):
        from headgate.stores.postgres import PostgresStore

        return PostgresStore(config.url, **config.options)
    return open_store(config.url)


def skew_clock(microseconds: int) -> None:
    """Set a wrong time in this process only."""
    time.time_ns = lambda: _wall_ns() + microseconds * 1000
    time.time = lambda: time.time_ns() / 1e9


def main() -> None:
    """Run the worker described by the command-line argument."""
    logging.disable(logging.CRITICAL)  # errors of stores are expected
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # a hanging worker prints its stacks
    worker = Worker(WorkerConfig(**json.loads(sys.argv[1])))
    worker.run()
    print(json.dumps(worker.errors))


if __name__ == "__main__":
    main()
