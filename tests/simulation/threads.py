"""A scheduler of threads for tests of the thread driver; the seed decides where threads switch.

Threads are real, but only one runs at a time. They switch when a thread takes the driver's lock, waits or sends and, in half
of the runs, at some lines of the driver. At these points an exception may interrupt a thread, as from a signal handler. Time
is virtual.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from random import Random
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import headgate._sync.waiting as waiting
import headgate.stores.redis.peer as redis_peer
import headgate.stores.remote.batching as batching
import headgate.stores.remote.connecting as connecting
import headgate.stores.remote.threads as driver
from headgate.outage._sync.gate import Circuit
from tests.faults.actor import Interrupted, run_at_once
from tests.simulation.network import SimulatedPoller
from tests.simulation.timeline import Process, Timeline

TRACED = (driver.__file__, batching.__file__)
"""The files in which threads may switch at any line."""

MOST_STEPS = 100_000
"""A run with more steps counts as endless."""


class Stopped(BaseException):
    """Ends threads that are still alive after a run."""


class SimulatedThread:
    """A thread, with its condition and time limit while it waits."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.turn = threading.Lock()
        self.turn.acquire()
        self.is_ready: Callable[[], bool] = lambda: True
        self.until = 0.0
        self.is_armed = False
        self.is_done = False


class Scheduler(Timeline):
    """Selects the running thread, and advances the time.

    Args:
        rng: The source of all random choices.
        interrupts: The share of switches at which a thread is interrupted.
        switches: The share of lines of the driver at which threads switch.

    Attributes:
        on_interrupt: Called when a thread is interrupted.
        running: The running thread, or None.
    """

    def __init__(self, rng: Random, interrupts: float, switches: float) -> None:
        super().__init__(rng)
        self.interrupts = interrupts
        self.on_interrupt: Callable[[], object] = lambda: None
        self._switches = switches
        self._threads: list[SimulatedThread] = []
        self.running: SimulatedThread | None = None
        self._is_over = False
        self._main = threading.Lock()
        self._main.acquire()
        self._steps = 0

    def current(self) -> Process:
        """Return the running process."""
        return self.running.process if self.running is not None else self.world

    def start(self, process: Process, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a thread in a process."""
        self.spawn(lambda: run_at_once(work), process=process)

    def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a thread outside of the simulated processes, and all other threads, to their ends."""
        self.start(self.world, work)
        self._next()
        self._main.acquire()
        self._is_over, self.running = True, None
        for thread in self._threads:
            if not thread.is_done:
                self.failures.append("a thread never ended")
                thread.turn.release()

    def drop(self) -> None:
        """Do nothing: no thread is left."""

    async def sleep(self, seconds: float) -> None:
        """Block the running thread."""
        self.wait(lambda: False, seconds)

    def spawn(
        self, work: Callable[..., object], arguments: tuple[Any, ...] = (), process: Process | None = None
    ) -> None:
        """Start a thread; it runs when the scheduler selects it."""
        thread = SimulatedThread(process or self.current())
        self._threads.append(thread)

        def run() -> None:
            thread.turn.acquire()
            if self._switches:
                sys.settrace(self._trace)
            try:
                if not self._is_over:
                    work(*arguments)
            except Stopped:
                pass
            except Exception as error:  # noqa: BLE001
                self.failures.append(f"a thread ended with {error!r}")
            sys.settrace(None)
            thread.is_done = True
            self._next()

        threading.Thread(target=run, daemon=True).start()

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Allow interruptions of the running thread in a block."""
        thread = self.running
        assert thread is not None
        thread.is_armed = True
        try:
            yield
        finally:
            thread.is_armed = False

    def point(self) -> None:
        """Switch to a random thread."""
        self._now += 1e-6
        self.wait(lambda: True, 0.0)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        """Switch to a random thread at some lines of the driver."""
        if event == "call":
            return self._trace if frame.f_code.co_filename in TRACED else None
        if event == "line" and self.rng.random() < self._switches:
            self.point()
        return self._trace

    def wait(self, is_ready: Callable[[], bool], seconds: float) -> bool:
        """Wait until a condition is true or the time is over; return whether it is true."""
        thread = self.running
        if thread is None:
            return is_ready()
        thread.is_ready, thread.until = is_ready, self._now + max(0.0, seconds)
        self._next()
        thread.turn.acquire()
        if self._is_over:
            raise Stopped
        if thread.is_armed and self.rng.random() < self.interrupts:
            thread.is_armed = False
            self.on_interrupt()
            raise Interrupted
        return is_ready()

    def _next(self) -> None:
        """Switch to a random thread that can run; otherwise advance the clock."""
        self._steps += 1
        if self._steps == MOST_STEPS:
            self.failures.append(f"the run did not end within {MOST_STEPS} steps")
            self._main.release()
        if self._steps >= MOST_STEPS or self._is_over:
            return
        while True:
            following = self._run_events()
            waiting = [thread for thread in self._threads if not thread.is_done]
            if not waiting:
                self._main.release()
                return
            able = [thread for thread in waiting if self._can_run(thread)]
            if able:
                self.running = self.rng.choice(able)
                self.running.turn.release()
                return
            times = [max(thread.until, thread.process.stopped_until) for thread in waiting]
            self._now = max(self._now, min(following, *times))

    def _can_run(self, thread: SimulatedThread) -> bool:
        is_due = thread.until <= self._now or thread.is_ready()
        return is_due and thread.process.stopped_until <= self._now

    @contextlib.contextmanager
    def patches(self) -> Iterator[None]:
        """Replace the driver's locks, events and threads within a block."""

        def call_later(seconds: float, method: Callable[..., None], *arguments: Any) -> bool:
            def work() -> None:
                self.wait(lambda: False, seconds)
                method(*arguments)

            self.spawn(work)
            return True

        with contextlib.ExitStack() as stack:
            for target, name, value in (
                (driver, "threading", SimpleNamespace(RLock=lambda: SimulatedRLock(self))),
                *((module, "Event", lambda: SimulatedEvent(self)) for module in (driver, waiting)),
                (connecting, "start_new_thread", self.spawn),
                (redis_peer, "Poller", SimulatedPoller),
                (Circuit, "_call_later", staticmethod(call_later)),
            ):
                stack.enter_context(patch.object(target, name, value))
            yield


class SimulatedRLock:
    """The driver's lock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owner: SimulatedThread | None = None
        self._count = 0

    def acquire(self, blocking: bool = True) -> bool:
        me = self._scheduler.running
        if self._owner is not me:
            self._scheduler.point()
            while self._owner is not None:
                if not blocking:
                    return False
                self._scheduler.wait(lambda: self._owner is None, 1e6)
            self._owner = me
        self._count += 1
        return True

    def release(self) -> None:
        self._count -= 1
        if not self._count:
            self._owner = None

    def _is_owned(self) -> bool:
        return self._count > 0 and self._owner is self._scheduler.running

    def _recursion_count(self) -> int:
        return self._count if self._is_owned() else 0


class SimulatedEvent:
    """An event of the driver, or of a waiting call."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.is_over = self._is_set = False
        self._scheduler = scheduler

    @property
    def is_dead(self) -> bool:
        return self.is_over

    def wait(self, seconds: float) -> bool:
        was_set = self._scheduler.wait(lambda: self._is_set, seconds)
        self._is_set = self._is_set and not was_set
        return was_set

    def set(self) -> bool:
        self._is_set = True
        return not self.is_over

    def clear(self) -> None:
        self._is_set = False

    def time(self) -> float:
        return self._scheduler.time()
