"""An event loop with a virtual clock, for several simulated processes at once.

Every process has its own queue of callbacks and its own timers, and runs one *turn* at a time, like a real event loop: first
the connections with new data, in random order, then the timers that are due, then all ready callbacks, first in, first
out. Which process runs next is random. Nothing waits: if no process has anything to do, the clock moves to the next
event. All randomness comes from one generator, so a seed replays exactly.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import inspect
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import Context, ContextVar, copy_context
from itertools import count
from random import Random
from types import FunctionType
from typing import Any

EPOCH_US = 1_800_000_000_000_000
"""When every simulation begins, in microseconds since the epoch."""

MOST_TURNS = 500_000
"""More than any run needs."""

HOST: ContextVar[Process] = ContextVar("process")


class Stuck(RuntimeError):
    """Nothing can ever happen again, though somebody waits."""


class Process:
    """A simulated process: the callbacks of its event loop, its timers, and its wall clock.

    Attributes:
        name: The name in reports.
        stopped_until: The end of a stop, or of a blocked event loop.
        skew_us: How far its wall clock is off.
        context: The context of its callbacks.
        arrived: Callbacks of connections with new data.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.stopped_until = 0.0
        self.skew_us = 0
        self.ready: deque[asyncio.Handle] = deque()
        self.timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self.arrived: dict[Any, Callable[[], None]] = {}
        self.context: Context = copy_context()
        self.context.run(HOST.set, self)

    def wakes_at(self, now: float) -> float:
        """Return when it has something to do."""
        while self.timers and self.timers[0][2].cancelled():
            heapq.heappop(self.timers)
        at = now if self.ready or self.arrived else self.timers[0][0] if self.timers else float("inf")
        return max(at, self.stopped_until)


class SimulatedLoop(asyncio.BaseEventLoop):
    """The event loop. Connections are opened by the `connect` that the network sets."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.rng = rng
        self.processes: list[Process] = []
        self.failures: list[str] = []
        self.connect: Callable[..., Any] | None = None
        self.turns = 0
        self._now = 1000.0
        self._numbers = count()
        self._running: Process | None = None
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self.world = self.new_process("world")
        self.set_exception_handler(self._on_failure)

    def new_process(self, name: str) -> Process:
        """Add a process."""
        process = Process(name)
        self.processes.append(process)
        return process

    def time(self) -> float:
        return self._now

    def now_us(self) -> int:
        """Return the true time in microseconds since the epoch."""
        return EPOCH_US + round((self._now - 1000.0) * 1e6)

    def at(self, when: float, event: Callable[[], object]) -> None:
        """Schedule an event outside of all processes."""
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def _call_soon(self, callback: Any, args: Any, context: Context | None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._process_of(context).ready.append(handle)
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._process_of(context).timers, (when, next(self._numbers), handle))
        return handle

    def current(self) -> Process:
        """Return the process that runs; background tasks have no context of it."""
        return HOST.get(self._running or self.world)

    def _process_of(self, context: Context | None) -> Process:
        return self.current() if context is None else context.get(HOST, self.current())

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _process_events(self, events: Any) -> None:
        pass

    async def create_connection(
        self, factory: Any, host: Any = None, port: Any = None, **options: Any
    ) -> Any:
        assert self.connect is not None
        return await self.connect(factory, host, port)

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:
        fd.reader = callback

    def remove_reader(self, fd: Any) -> None:
        fd.reader = None

    def add_writer(self, fd: Any, callback: Any, *args: Any) -> None:
        raise AssertionError("a simulated connection takes everything at once")

    def remove_writer(self, fd: Any) -> None:
        pass

    def _on_failure(self, _: object, about: dict[str, Any]) -> None:
        error = about.get("exception")
        self.failures.append(f"{about.get('message')}: {error!r}")

    def _run_once(self) -> None:
        """Run due events, then one turn of one process; advance the clock if no process can run."""
        self._running = None
        while self._events and self._events[0][0] <= self._now:
            heapq.heappop(self._events)[2]()
        wakes = [(process.wakes_at(self._now), process) for process in self.processes]
        able = [process for at, process in wakes if at <= self._now]
        if able:
            self._turn(able[0] if len(able) == 1 else self.rng.choice(able))
            return
        following = min(wakes, key=lambda entry: entry[0])[0]
        if self._events:
            following = min(following, self._events[0][0])
        if following == float("inf"):
            raise Stuck("nothing can happen any more")
        self._now = following

    def _turn(self, process: Process) -> None:
        self.turns += 1
        if self.turns > MOST_TURNS:
            raise Stuck(f"no end after {MOST_TURNS} turns")
        self._running = process
        if process.arrived:
            arrived, process.arrived = list(process.arrived.values()), {}
            self.rng.shuffle(arrived)
            # As in a real loop, reading comes before due timers, and both come after ready callbacks.
            process.ready.extend(asyncio.Handle(read, (), self, process.context) for read in arrived)
        while process.timers and process.timers[0][0] <= self._now:
            timer = heapq.heappop(process.timers)[2]
            if not timer.cancelled():
                process.ready.append(timer)
        for _ in range(len(process.ready)):
            handle = process.ready.popleft()
            if not handle.cancelled():
                handle._run()
                self._now += 2e-6
            if process.stopped_until > self._now:
                break  # blocked in the middle of a turn
        self._now += self.rng.random() * 3e-5


# --- Time -------------------------------------------------------------------------------------------------------------

_REAL = {
    name: getattr(time, name)
    for name in ("monotonic", "monotonic_ns", "perf_counter", "time", "time_ns", "process_time")
}
_sites: list[tuple[Any, str, str]] | None = None


@contextlib.contextmanager
def virtual_time(loop: SimulatedLoop) -> Iterator[None]:
    """Replace the functions of `time` by the loop's clock; each process has its own wall clock."""

    def wall_us() -> int:
        return loop.now_us() + loop.current().skew_us

    virtual = {
        "monotonic": loop.time,
        "perf_counter": loop.time,
        "monotonic_ns": lambda: round(loop.time() * 1e9),
        "time": lambda: wall_us() / 1e6,
        "time_ns": lambda: wall_us() * 1000,
        "process_time": lambda: 0.0,
    }
    for site, attribute, name in _find_sites():
        setattr(site, attribute, _replaced(getattr(site, attribute), virtual[name], name))
    try:
        yield
    finally:
        for site, attribute, name in _find_sites():
            setattr(site, attribute, _replaced(getattr(site, attribute), _REAL[name], name, virtual[name]))


def _find_sites() -> list[tuple[Any, str, str]]:
    """Return the places where our modules keep functions of `time`: module attributes and default arguments."""
    global _sites
    if _sites is None:
        _sites = [(time, name, name) for name in _REAL]
        for module in [module for name, module in sys.modules.items() if name.startswith("headgate")]:
            for attribute, value in list(vars(module).items()):
                _sites += [(module, attribute, name) for name, real in _REAL.items() if value is real]
                functions = vars(value).values() if inspect.isclass(value) else (value,)
                for function in functions:
                    if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                        for name, real in _REAL.items():
                            if any(default is real for default in function.__defaults__ or ()):
                                _sites.append((function, "__defaults__", name))
    return _sites


def _replaced(value: Any, new: Any, name: str, old: Any = None) -> Any:
    old = old or _REAL[name]
    return tuple(new if entry is old else entry for entry in value) if isinstance(value, tuple) else new
