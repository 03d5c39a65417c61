"""A process that hammers limiters and records what it sees: `python -m tests.faults.worker '{"url": ...}'`.

It is written once for threads and for tasks: in a thread nothing that is awaited ever waits, so a coroutine runs to its end
at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
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
from collections.abc import Callable, Coroutine
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
from tests.faults.broken import BrokenStore
from tests.faults.recording import OPERATIONS, OUTCOMES, SOLO, Recorder
from tests.faults.traffic import Subject, subjects

_wall_ns = time.time_ns  # before the clock of this process is skewed
OP = {name: number for number, name in enumerate(OPERATIONS)}
OUT = {name: number for number, name in enumerate(OUTCOMES)}
by_remaining, by_limit = attrgetter("remaining"), attrgetter("limit")
SHARED_KEYS = 2
OPEN_HOLDS = 3
PAUSE = 0.003
TICK_US = 20
FIRST_TICK_US = 1_700_000_000_000_000
KEY_LIFE_US = 3_000_000
"""After so long other keys are used: what is unknown of the old ones makes their bounds wide."""
KEY_LIVES = 400
OTHERS_CANCELLED = 500
"""One in this many calls other than holds and renewals is cancelled."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What a worker is to do.

    Attributes:
        url: The store.
        history: Where to write.
        seed: Of its random choices.
        scale: Of the limits.
        tasks: Whether in tasks, rather than in threads.
        actors: How many of them.
        calls: After how many calls it ends; 0 for any number, as long as there is room in the history.
        over: It ends when there is this file.
        capacity: How many calls the history has room for.
        options: Arguments of the store.
        policy: What limiters answer when the store is down.
        skew_us: How far the clock of this process is off.
        quotas: Whether calls may bring their own quotas.
        cancels: One in this many holds and renewals in tasks is cancelled; 0 for none, and for no other calls.
        interrupts: Whether a signal handler raises in the main thread now and then.
        full_disk: Whether this process cannot write to files now and then.
        broken: Name of a bug to be put into a store in memory.
        burst: How many hits are made at once at most; 1 for no bursts.
        deadline: Of calls to a remote store, in seconds; `None` for the usual one.
    """

    url: str
    history: str
    seed: int
    scale: int = 1
    tasks: bool = False
    actors: int = 2
    calls: int = 0
    over: str = ""
    capacity: int = 200_000
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
    """A clock that goes on by a tick whenever it is read, so that a busy machine changes nothing."""

    def __init__(self) -> None:
        self.now_us = count(FIRST_TICK_US, TICK_US).__next__  # type: ignore[method-assign]


class Interrupted(Exception):
    """What the signal handler raises."""


class Interrupter:
    """Raises in the main thread, at any moment of a call of the library and never elsewhere."""

    def __init__(self) -> None:
        self.armed = False

    def start(self, rng: random.Random) -> None:
        """Begin to interrupt."""
        signal.signal(signal.SIGALRM, self._interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.01, rng.uniform(0.005, 0.05))

    def _interrupt(self, *_: object) -> None:
        if self.armed:
            self.armed = False
            raise Interrupted


class Actor:
    """One thread or task that calls limiters, one call after the other."""

    def __init__(self, worker: Worker, number: int) -> None:
        self._worker = worker
        self._random = random.Random(worker.orders.seed * 1000 + number)
        self._holds: list[
            tuple[Any, str, int, int]
        ] = []  # with the limiter's name, the key and the number of the call
        is_main = number == 0 and not worker.orders.tasks and worker.orders.interrupts
        self._interrupter = worker.interrupter if is_main else Interrupter()
        self._calls = 0

    async def run(self) -> None:
        """Call until it is time to end."""
        while not self._worker.is_over():
            if self._holds and self._random.random() < 0.45:
                await self._end_a_hold()
            else:
                await self._decide()
            self._calls += 1
            if self._worker.orders.tasks and self._calls % 4 == 0:
                await asyncio.sleep(0)
        await self._give_back_all()

    async def _give_back_all(self) -> None:
        """Release all open holds, and check that their places are free."""
        worker = self._worker
        while self._holds:
            hold, name, key, number = self._holds.pop()
            await self._call("settle", name, key, 0, partial(hold.settle, 0), number)
        life = worker.now() // KEY_LIFE_US % KEY_LIVES
        for name, subject in worker.subjects.items():
            if subject.places:
                check = partial(worker.limiters[name].check, subject.key(worker.key(SOLO + life)), 1)
                await self._call("check", name, SOLO + life, 1, check)

    async def _decide(self) -> None:
        rng, worker = self._random, self._worker
        name = rng.choice(worker.names)
        subject = worker.subjects[name]
        life = worker.now() // KEY_LIFE_US % KEY_LIVES
        key = SHARED_KEYS * life + rng.randrange(SHARED_KEYS) if rng.random() < 0.7 else SOLO + life
        operation = self._operation(subject)
        cost = rng.choice((1, 1, 1, 1, 2, 3))
        arguments: dict[str, Any] = {}
        choice = rng.random()
        if choice < 0.2:
            arguments["tier"] = rng.choice(subject.tiers)
        elif choice < 0.3 and subject.quotas and worker.orders.quotas:
            arguments["quota"] = rng.choice(subject.quotas)
        limiter = worker.limiters[name]
        if operation == "hit" and worker.orders.burst > 1:
            hit = partial(limiter.hit, subject.key(worker.key(key)), cost, **arguments)
            await self._burst(name, key, cost, hit, rng.randint(2, worker.orders.burst))
            return
        call = getattr(limiter, operation)
        answer = await self._call(
            operation, name, key, cost, lambda: call(subject.key(worker.key(key)), cost, **arguments)
        )
        if operation == "hold" and answer is not None and len(self._holds) < OPEN_HOLDS:
            hold, number = answer
            if hold.allowed and not hold.decision.degraded:
                self._holds.append(
                    (hold, name, key, number)
                )  # beyond that it is left alone, as by a holder that crashed

    async def _burst(self, name: str, key: int, cost: int, hit: Callable[[], Any], times: int) -> None:
        """Make many hits on one key, all at once in tasks, and record together what ended alike."""
        worker, recorder = self._worker, self._worker.recorder
        about, start = (OP["hits"], worker.names.index(name), key), worker.now()
        number = recorder.begin(*about, cost * times, start, times=times)
        decisions, errors = await self._answers(hit, times)
        end = worker.now()
        admitted, refused, unknown = [], [], []
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
                one = recorder.begin(OP[made], *about[1:], units, start, times=len(some))
                recorder.finish(one, OUT[outcome], end, some[-1].fields)
        unclear = len(unknown) + sum(not isinstance(error, CostTooHigh) for error in errors)
        recorder.lower(number, cost * unclear, unclear)
        recorder.finish(number, OUT["unknown" if unclear else "nothing"], end, ())
        if unclear:
            await worker.pause()

    async def _answers(self, hit: Callable[[], Any], times: int) -> tuple[list[Decision], list[Exception]]:
        """Return what comes of hits: at once in tasks of a remote store, else one after the other, up to the first that
        fails, and not for long: what the checker sees is how long they took together.
        """
        worker, interrupter, due = self._worker, self._interrupter, time.monotonic() + 1
        decisions: list[Decision] = []
        errors: list[Any] = []
        if worker.orders.tasks and worker.store.remote:
            answers = await asyncio.gather(*(hit() for _ in range(times)), return_exceptions=True)
            decisions = [answer for answer in answers if isinstance(answer, Decision)]
            errors = [answer for answer in answers if not isinstance(answer, Decision)]
        else:
            try:
                try:
                    interrupter.armed = True
                    for number in range(times):
                        answer = hit()
                        decisions.append(await answer if worker.orders.tasks else answer)
                        if number % 8 == 7 and time.monotonic() > due:
                            break
                finally:
                    interrupter.armed = False
            except (Interrupted, StoreError, CostTooHigh) as error:
                errors = [error]
        for error in errors:
            if not isinstance(error, Interrupted | StoreError | CostTooHigh):
                raise error
            worker.errors[type(error).__name__] += 1
        return decisions, errors

    def _operation(self, subject: Subject) -> str:
        choice = self._random.random()
        if choice < 0.1:
            return "check"
        if choice < 0.12 and subject.records:
            return "record"
        return "hold" if subject.places or choice < 0.4 else "hit"

    async def _end_a_hold(self) -> None:
        rng = self._random
        hold, name, key, number = entry = self._holds[rng.randrange(len(self._holds))]
        choice = rng.random()
        if choice < 0.04:
            self._holds.remove(entry)  # its holder crashes
        elif choice < 0.3:
            cost = rng.choice((hold.cost, hold.cost, hold.cost + 1))
            answer = await self._call("confirm", name, key, cost, lambda: hold.confirm(cost), number)
            if answer is None or answer[0].allowed:
                self._holds.remove(entry)
        elif choice < 0.5 and self._worker.subjects[name].places:
            await self._call("renew", name, key, hold.cost, hold.renew, number)
        else:
            self._holds.remove(entry)
            cost = rng.choice((0, 0, rng.randrange(hold.cost + 1), hold.cost + 1))
            await self._call("settle", name, key, cost, lambda: hold.settle(cost), number)

    async def _call(
        self, operation: str, name: str, key: int, cost: int, make: Callable[[], Any], hold: int = -1
    ) -> tuple[Any, int] | None:
        """Make a call and record it; return its answer with the call's number, or nothing if there is none."""
        worker, interrupter = self._worker, self._interrupter
        number = worker.recorder.begin(OP[operation], worker.names.index(name), key, cost, worker.now(), hold)
        answer: Any = None
        outcome = ""
        try:
            try:
                interrupter.armed = True
                answer = make()
                if inspect.isawaitable(answer):
                    answer = await self._awaited(operation, answer)
            finally:
                interrupter.armed = False
        except Interrupted:
            outcome = "unknown"
        except asyncio.CancelledError:
            outcome = "cancelled"
        except CostTooHigh:
            outcome = "nothing"
        except StoreError as error:  # also an overload: the call may have been sent, though late
            outcome = "unknown"
            worker.errors[type(error).__name__] += 1
        verdicts: Any = ()
        if not outcome and operation == "record":
            outcome = "unknown" if answer.degraded else "done"
        elif not outcome and operation == "settle":
            # Only a limiter that raises says whether it was done; one of our server never does so for its own store.
            is_certain = worker.orders.policy == "raise" and not worker.orders.url.startswith("http")
            outcome = "done" if is_certain else "unknown"
        elif not outcome:
            decision = getattr(answer, "decision", answer)
            outcome = "unknown" if decision.degraded else "admitted" if decision.allowed else "refused"
            verdicts = () if decision.degraded else decision.fields
        worker.recorder.finish(number, OUT[outcome], worker.now(), verdicts)
        if outcome == "unknown":
            await worker.pause()
        return (answer, number) if outcome in ("admitted", "refused") else None

    async def _awaited(self, operation: str, answer: Any) -> Any:
        cancels = self._worker.orders.cancels
        is_often = operation in ("hold", "renew")
        if not cancels or self._random.randrange(cancels if is_often else OTHERS_CANCELLED):
            return await answer
        task = asyncio.ensure_future(answer)
        for _ in range(self._random.randrange(6)):
            await asyncio.sleep(0)
        task.cancel()
        return await task


class Worker:
    """The process: its limiters, its history, and what ends it."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.subjects = subjects(orders.scale)
        self.names = list(self.subjects)
        self.recorder = Recorder(Path(orders.history), orders.capacity)
        self.interrupter = Interrupter()
        self.errors: Counter[str] = Counter()
        self._random = random.Random(orders.seed)
        self._over = False
        self._made = 0
        self.store: Any = open_worker_store(orders)
        # What lives in this process counts by a clock of its own; everything else by the wall clock of the machine.
        is_own = orders.url == "memory://"
        self.now: Callable[[], int] = self.store.clock.now_us if is_own else lambda: _wall_ns() // 1000
        self.limiters: dict[str, Any] = {}
        self._filler = threading.Thread(target=self._fill_disk)

    def run(self) -> None:
        """Call until it is time to end, and close everything."""
        try:
            self._run()
        finally:
            self._over = True
            if self.orders.full_disk:
                self._filler.join()

    def _run(self) -> None:
        orders = self.orders
        if orders.skew_us:
            skew_clock(orders.skew_us)
        if orders.full_disk:
            self._filler.start()
        if orders.tasks:
            asyncio.run(self._run_tasks())
            return
        self.limiters = self._make_limiters(Limiter)
        threads = [
            threading.Thread(target=run_at_once, args=(Actor(self, i).run,)) for i in range(1, orders.actors)
        ]
        for thread in threads:
            thread.start()
        if orders.interrupts:
            self.interrupter.start(self._random)
        try:
            run_at_once(Actor(self, 0).run)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._over = True
        for thread in threads:
            thread.join()
        self.store.close()

    async def _run_tasks(self) -> None:
        self.limiters = self._make_limiters(AsyncLimiter)
        async with asyncio.TaskGroup() as group:
            for i in range(self.orders.actors):
                group.create_task(Actor(self, i).run())
        await self.store.aclose()

    def _make_limiters(self, kind: Callable[..., Any]) -> dict[str, Any]:
        policy: Any = local(0.25) if self.orders.policy == "local" else self.orders.policy
        return {
            name: kind(
                *subject.rules,
                name=name,
                store=self.store,
                on_store_error=policy if self.store.remote else None,
                deadline=self.orders.deadline if self.store.remote else None,
            )
            for name, subject in self.subjects.items()
        }

    def key(self, number: int) -> str:
        """Return the key of a number: one that all workers share, or one of this worker alone.

        Each round has its own: what the one before has counted on the same store may still count.
        """
        path = Path(self.orders.history)
        return (
            f"{path.parent.name} k{number}" if number < SOLO else f"{path.parent.name} w{path.stem}-{number}"
        )

    def is_over(self) -> bool:
        """Return whether to end."""
        self._made += 1
        is_late = self._made % 16 == 0 and os.path.exists(self.orders.over)  # noqa: PTH110  # it is quick
        # Room for the calls that other threads are about to make.
        is_full = self._made >= (self.orders.calls or self.recorder.capacity - 100)
        self._over = self._over or is_late or is_full
        return self._over

    async def pause(self) -> None:
        """Wait a little: a store that is down fails at once, and a history need not be full of that."""
        if self.orders.tasks:
            await asyncio.sleep(PAUSE)
        elif self.store.remote:
            time.sleep(PAUSE)  # noqa: ASYNC251  # in a thread

    def _fill_disk(self) -> None:
        """Take away the room for files now and then."""
        while not self._over:
            time.sleep(self._random.uniform(0.1, 0.6))
            usual = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, usual[1]))
            time.sleep(self._random.uniform(0.01, 0.1))
            resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def open_worker_store(orders: Orders) -> Any:
    """Return the store that a worker counts on."""
    if orders.url == "memory://":
        store = MemoryStore(clock=TickingClock())
        return BrokenStore(orders.broken, store) if orders.broken else store
    if orders.url.startswith("postgres"):
        from headgate.stores.postgres import PostgresStore

        return PostgresStore(orders.url, **orders.options)
    return open_store(orders.url)


def run_at_once(function: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine that never waits."""
    with contextlib.suppress(StopIteration):
        function().send(None)
        raise AssertionError("it waits")


def skew_clock(microseconds: int) -> None:
    """Set the clock of this process, and of no other, to a wrong time."""
    time.time_ns = lambda: _wall_ns() + microseconds * 1000
    time.time = lambda: time.time_ns() / 1e9


def main() -> None:
    """Do what the argument says."""
    logging.disable(logging.CRITICAL)  # what happens to stores is part of the plan
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # so that one that hangs says where
    worker = Worker(Orders(**json.loads(sys.argv[1])))
    worker.run()
    print(json.dumps(worker.errors))


if __name__ == "__main__":
    main()
