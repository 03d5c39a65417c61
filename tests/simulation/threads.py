"""The thread driver under a scheduler: threads that switch where a seed decides.

Threads are real, but only one of them runs at a time, until it takes the driver's lock, waits or sends, and, in half of the
runs, at some lines of the driver. There it may also be interrupted by an exception, as by a signal handler. Time is virtual.
"""

from __future__ import annotations

import heapq
import random
import sys
import threading
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from random import Random
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from hiredis import Reader
from redis.exceptions import InvalidResponse

import headgate.stores.remote.batching as batching
import headgate.stores.remote.connecting as connecting
import headgate.stores.remote.threads as driver
from headgate import CostTooHigh, Limiter, StoreError
from headgate.outage._sync.gate import Circuit
from headgate.stores.redis import RedisStore
from headgate.stores.redis.endpoint import error_of
from headgate.stores.redis.peer import RedisPeer
from headgate.stores.remote.peer import PENDING
from tests.faults.checker import check
from tests.faults.history import History
from tests.simulation.judge import check_places
from tests.simulation.loop import EPOCH_US, virtual_time
from tests.simulation.programs import DEADLINE, Recorder, Subject, random_subject
from tests.simulation.run import Outcome, _quiet
from tests.simulation.servers import RedisServer

TRACED = (driver.__file__, batching.__file__)
"""Where threads switch at any line."""

MOST_STEPS = 100_000
"""More than any run needs."""


class Interrupted(Exception):
    """An exception from a signal handler."""


class Stopped(BaseException):
    """Ends a thread that is left over when a run is over."""


class SimulatedThread:
    """A thread: its condition and time limit while it waits, and whether it may be interrupted."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.turn.acquire()
        self.is_ready: Callable[[], bool] = lambda: True
        self.until = 0.0
        self.is_armed = False
        self.is_done = False


class Scheduler:
    """Decides which thread runs, and what time it is; it also is the world around the server."""

    def __init__(self, rng: Random, interrupts: float, switches: float) -> None:
        self.rng = rng
        self.interrupts = interrupts
        self.switches = switches
        self.faults = 0
        self.world = SimpleNamespace(skew_us=0)
        self.threads: list[SimulatedThread] = []
        self.running: SimulatedThread | None = None
        self.is_over = False
        self.failures: list[str] = []
        self._main = threading.Lock()
        self._main.acquire()
        self._now = 1000.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()
        self._steps = 0

    def time(self) -> float:
        return self._now

    def now_us(self) -> int:
        return EPOCH_US + round((self._now - 1000.0) * 1e6)

    def current(self) -> Any:
        return self.world

    def at(self, seconds: float, event: Callable[[], object]) -> None:
        """Schedule an event after `seconds`."""
        heapq.heappush(self._events, (self._now + seconds, next(self._numbers), event))

    def spawn(self, work: Callable[..., object], arguments: tuple[Any, ...] = ()) -> None:
        """Start a thread; it runs when it is chosen."""
        thread = SimulatedThread()
        self.threads.append(thread)

        def run() -> None:
            thread.turn.acquire()
            if self.switches:
                sys.settrace(self._trace)
            try:
                if not self.is_over:
                    work(*arguments)
            except Stopped:
                pass
            except Exception as error:  # noqa: BLE001
                self.failures.append(f"a thread ended with {error!r}")
            sys.settrace(None)
            thread.is_done = True
            self._next()

        threading.Thread(target=run, daemon=True).start()

    def run(self) -> None:
        """Run all threads to their ends."""
        self._next()
        self._main.acquire()
        self.is_over, self.running = True, None
        for thread in self.threads:
            if not thread.is_done:
                self.failures.append("a thread never ended")
                thread.turn.release()

    def point(self) -> None:
        """Switch to a random thread."""
        self._now += 1e-6
        self.wait(lambda: True, 0.0)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        """Switch to a random thread at some lines of the driver."""
        if event == "call":
            return self._trace if frame.f_code.co_filename in TRACED else None
        if event == "line" and self.rng.random() < self.switches:
            self.point()
        return self._trace

    def wait(self, is_ready: Callable[[], bool], seconds: float) -> bool:
        """Wait until something is so, or the time is up; return whether it is so."""
        thread = self.running
        if thread is None:
            return is_ready()
        thread.is_ready, thread.until = is_ready, self._now + max(0.0, seconds)
        self._next()
        thread.turn.acquire()
        if self.is_over:
            raise Stopped
        if thread.is_armed and self.rng.random() < self.interrupts:
            thread.is_armed = False
            self.faults += 1
            raise Interrupted
        return is_ready()

    def _next(self) -> None:
        """Switch to a random thread that can run; otherwise advance the clock."""
        self._steps += 1
        if self._steps == MOST_STEPS:
            self.failures.append(f"no end after {MOST_STEPS} steps")
            self._main.release()
        if self._steps >= MOST_STEPS or self.is_over:
            return
        while True:
            while self._events and self._events[0][0] <= self._now:
                heapq.heappop(self._events)[2]()
            waiting = [thread for thread in self.threads if not thread.is_done]
            able = [thread for thread in waiting if thread.until <= self._now or thread.is_ready()]
            if able:
                self.running = self.rng.choice(able)
                self.running.turn.release()
                return
            times = [thread.until for thread in waiting] + [event[0] for event in self._events[:1]]
            if not waiting or not times:
                self._main.release()
                return
            self._now = max(self._now, min(times))


class SimulatedRLock:
    """The driver's lock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owner: SimulatedThread | None = None
        self._count = 0

    def acquire(self) -> bool:
        me = self._scheduler.running
        if self._owner is not me:
            self._scheduler.point()
            while self._owner is not None:
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


class SimulatedWakeUp:
    """What one thread waits for and another sets."""

    scheduler: Scheduler

    def __init__(self) -> None:
        self._is_set = False

    def wait(self, seconds: float) -> None:
        if self.scheduler.wait(lambda: self._is_set, seconds):
            self._is_set = False

    def set(self) -> None:
        self._is_set = True


class ThreadWire:
    """A connection for threads that makes faults."""

    def __init__(self, scheduler: Scheduler, server: RedisServer, disturbs: float) -> None:
        self._scheduler = scheduler
        self._disturbs = disturbs
        self._reader = Reader(protocolError=InvalidResponse, replyError=error_of)
        self._session = server.session(self)  # type: ignore[arg-type]
        self._inbox: list[bytes] = []
        self._is_lost = self.is_closed = False
        self._replies: list[Any] = []
        self._expected = 0

    def is_over(self) -> bool:
        return self._is_lost

    def send(self, *message: Any) -> None:
        """Send a message to the server; or, as its link, the server's bytes to the client."""
        if len(message) == 2:
            self._travel(lambda: self._inbox.append(message[1]))
            return
        commands, self._expected = message[0]
        self._replies = []
        self._travel(lambda: self._session.receive(commands))
        self._scheduler.point()

    def _travel(self, arrive: Callable[[], object]) -> None:
        rng = self._scheduler.rng
        seconds = rng.random() * 0.0005
        if rng.random() < self._disturbs:
            self._scheduler.faults += 1
            kind = rng.choice(("lose", "late", "silence"))
            if kind == "lose":
                self._scheduler.at(seconds, lambda: setattr(self, "_is_lost", True))
            if kind != "late":
                return
            seconds += rng.choice((0.02, 0.5, 1.5)) * rng.random()
        self._scheduler.at(seconds, lambda: None if self._is_lost else arrive())

    def wait(self, seconds: float) -> bool:
        return self._scheduler.wait(lambda: bool(self._inbox or self._is_lost), seconds)

    def receive(self) -> Any:
        while self._inbox:
            self._reader.feed(self._inbox.pop(0))
        while (reply := self._reader.gets()) is not False:
            self._replies.append(reply)
        if len(self._replies) >= self._expected:
            return self._replies
        if self._is_lost:
            raise ConnectionResetError("the server has closed the connection")
        return PENDING

    def close(self) -> None:
        self.is_closed = self._is_lost = True


class Caller:
    """A thread that calls limiters."""

    def __init__(
        self, scheduler: Scheduler, limiters: Any, subjects: list[Subject], calls: int, recorder: Recorder
    ) -> None:
        self._scheduler = scheduler
        self._limiters = limiters
        self._subjects = subjects
        self._calls = calls
        self._rng = Random(scheduler.rng.random())
        self._recorder = recorder
        self._holds: list[tuple[Any, Subject, int]] = []

    def run(self) -> None:
        for _ in range(self._calls):
            if self._holds and self._rng.random() < 0.5:
                self._settle()
            else:
                self._decide()
            self._scheduler.wait(lambda: False, self._rng.random() * 0.003)

    def _settle(self) -> None:
        hold, subject, number = self._holds.pop(self._rng.randrange(len(self._holds)))
        cost = self._rng.choice((0, 1))
        self._call("settle", subject, cost, lambda: hold.settle(subject.cost(cost)), number)

    def _decide(self) -> None:
        rng = self._rng
        subject = rng.choice(self._subjects)
        cost = rng.choice((1, 1, 2))
        operation = (
            "hold" if subject.has_places or rng.random() < 0.4 else rng.choice(("hit", "hit", "check"))
        )
        decide = getattr(self._limiters[subject.name], operation)
        made = self._call(operation, subject, cost, lambda: decide(subject.key("a"), subject.cost(cost)))
        if operation == "hold" and made is not None and made[0].allowed:
            self._holds.append((made[0], subject, made[1]))

    def _call(
        self, operation: str, subject: Subject, cost: int, make: Callable[[], Any], hold: int | None = None
    ) -> tuple[Any, int] | None:
        recorder, thread = self._recorder, self._scheduler.running
        assert thread is not None
        call = recorder.begin(0, operation, subject.name, "a", cost, hold=hold)
        try:
            thread.is_armed = True
            try:
                answer = make()
            finally:
                thread.is_armed = False
        except CostTooHigh:
            recorder.finish(call, "nothing")
            return None
        except (StoreError, Interrupted) as error:
            recorder.finish(call, "unknown")
            if isinstance(error, StoreError) and not self._scheduler.faults:
                recorder.surprises.append(f"{operation} failed without a fault: {error!r}")
            return None
        recorder.finish_with(call, answer)
        return answer, call[1]


def run_threads(seed: int) -> Outcome:
    """Run one simulation of threads and judge it."""
    rng = Random(seed)
    outcome = Outcome(seed, "redis in threads")
    scheduler = Scheduler(rng, interrupts=rng.choice((0.0, 0.0, 0.01)), switches=rng.choice((0.0, 0.05)))
    disturbs = rng.choice((0.0, 0.0, 0.02, 0.1))
    server = RedisServer(scheduler)  # type: ignore[arg-type]
    subjects = [random_subject(rng, f"limiter-{i}") for i in range(rng.choice((1, 2)))]
    recorder = Recorder(server.now_us)

    def connect(peer: Any, seconds: float) -> ThreadWire:
        scheduler.wait(lambda: False, rng.random() * 0.001)
        return ThreadWire(scheduler, server, disturbs)

    def call_later(seconds: float, method: Callable[..., None], *arguments: Any) -> bool:
        def work() -> None:
            scheduler.wait(lambda: False, seconds)
            method(*arguments)

        scheduler.spawn(work)
        return True

    wakeup = type("WakeUp", (SimulatedWakeUp,), {"scheduler": scheduler})
    with ExitStack() as stack:
        stack.enter_context(virtual_time(scheduler))  # type: ignore[arg-type]
        stack.enter_context(_quiet())
        for target, name, value in (
            (random, "SystemRandom", lambda: Random(rng.random())),
            (driver, "new_rlock", lambda: SimulatedRLock(scheduler)),
            (driver, "WakeUp", wakeup),
            (connecting, "start_new_thread", scheduler.spawn),
            (RedisPeer, "connect", connect),
            (Circuit, "_call_later", staticmethod(call_later)),
        ):
            stack.enter_context(patch.object(target, name, value))
        store = RedisStore("redis://10.0.0.1", deadline=DEADLINE)
        limiters = {
            s.name: Limiter(*s.rules, name=s.name, store=store, on_store_error="raise") for s in subjects
        }
        calls = rng.choice((3, 10, 20))
        for _ in range(rng.choice((1, 2, 3, 8))):
            scheduler.spawn(Caller(scheduler, limiters, subjects, calls, recorder).run)
        scheduler.run()
        store.close()
    is_disturbed = disturbs or scheduler.interrupts
    history = History(
        {subject.name: subject.specs for subject in subjects},
        list(recorder.calls.values()),
        faults=[(0, 2**62)] if is_disturbed else [],
        slack_us=100,
        longest_us=round(DEADLINE * 2.2e6),
    )
    outcome.history, outcome.calls = history, len(history.calls)
    outcome.faults = {"threads": scheduler.faults}
    outcome.trace = zlib.crc32(repr(history.calls).encode())
    outcome.violations += recorder.surprises + scheduler.failures + [str(found) for found in check(history)]
    outcome.violations += check_places(history, _held(server, subjects))
    return outcome


def _held(server: RedisServer, subjects: list[Subject]) -> dict[tuple[str, int, str], tuple[int, bool]]:
    """Return the places that the server has in the end."""
    held = {}
    for subject in subjects:
        for i, rule in enumerate(subject.rules):
            if rule.kind == "concurrent":
                parts = (subject.name.encode(), rule.name.encode())
                states = [state for key, state in server.states.items() if all(part in key for part in parts)]
                held[subject.name, i, "a"] = sum(sum(state[4::3]) for state in states), True
    return held
