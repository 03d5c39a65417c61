"""Virtual time: a queue of events, clocks that may be wrong, and replacements of the functions of `time`."""

from __future__ import annotations

import contextlib
import heapq
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import Context, ContextVar, copy_context
from itertools import count
from random import Random
from types import FunctionType
from typing import Any

EPOCH_US = 1_800_000_000_000_000
"""The time at which every simulation begins, in microseconds since the epoch."""

HOST: ContextVar[Process] = ContextVar("process")


class Stuck(RuntimeError):
    """The run does not end, although callers wait."""


class WrongClock:
    """A wall clock that may be set to another time, and may run too fast or too slow.

    Args:
        true_us: Returns the true time in microseconds.
    """

    def __init__(self, true_us: Callable[[], int]) -> None:
        self._true_us = true_us
        self._offset = 0
        self._rate = 0.0
        self._since = true_us()

    def now_us(self) -> int:
        """Return the time of this clock."""
        true = self._true_us()
        return true + self._offset + round(self._rate * (true - self._since))

    def step(self, by_us: int) -> None:
        """Set the clock forward, or back."""
        self._offset += by_us

    def drift(self, rate: float) -> None:
        """Make the clock gain `rate` seconds per second from now on."""
        true = self._true_us()
        self._offset, self._since, self._rate = self.now_us() - true, true, rate


class Process:
    """A simulated process.

    Attributes:
        clock: Its wall clock.
        stopped_until: The end of a stop, or of a blocked event loop.
        is_dead: Whether it was killed.
        context: The context of its callbacks.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.clock = WrongClock(timeline.now_us)
        self.stopped_until = 0.0
        self.is_dead = False
        self.context: Context = copy_context()
        self.context.run(HOST.set, self)


class Timeline:
    """The time of a simulation, and its scheduled events outside of processes."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.failures: list[str] = []
        self._now = 1000.0
        self._numbers = count()
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self.world = self.new_process()

    def new_process(self) -> Process:
        """Add a process."""
        return Process(self)

    def current(self) -> Process:
        """Return the running process."""
        return HOST.get(self.world)

    def time(self) -> float:
        """Return the monotonic time in seconds."""
        return self._now

    def now_us(self) -> int:
        """Return the true time in microseconds since the epoch."""
        return EPOCH_US + round((self._now - 1000.0) * 1e6)

    def at(self, when: float, event: Callable[[], object]) -> None:
        """Schedule an event."""
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def after(self, seconds: float, event: Callable[[], object]) -> None:
        """Schedule an event after some time."""
        self.at(self._now + seconds, event)

    def wait(self, is_ready: Callable[[], bool], seconds: float) -> bool:
        """Block until a condition is true or the time is over; return whether it is true."""
        raise NotImplementedError

    def _run_events(self) -> float:
        """Run all due events; return the time of the next event."""
        while self._events and self._events[0][0] <= self._now:
            heapq.heappop(self._events)[2]()
        return self._events[0][0] if self._events else float("inf")


_REAL = {
    name: getattr(time, name)
    for name in ("monotonic", "monotonic_ns", "perf_counter", "time", "time_ns", "process_time", "sleep")
}
_sites: list[tuple[Any, str, str]] | None = None


@contextlib.contextmanager
def virtual_time(timeline: Timeline) -> Iterator[None]:
    """Replace the functions of `time`; each process has its own wall clock."""

    def wall_us() -> int:
        return timeline.current().clock.now_us()

    virtual = {
        "monotonic": timeline.time,
        "perf_counter": timeline.time,
        "monotonic_ns": lambda: round(timeline.time() * 1e9),
        "time": lambda: wall_us() / 1e6,
        "time_ns": lambda: wall_us() * 1000,
        "process_time": lambda: 0.0,
        "sleep": lambda seconds: timeline.wait(lambda: False, seconds),
    }
    for site, attribute, name in _find_sites():
        setattr(site, attribute, _replaced(getattr(site, attribute), _REAL[name], virtual[name]))
    try:
        yield
    finally:
        for site, attribute, name in _find_sites():
            setattr(site, attribute, _replaced(getattr(site, attribute), virtual[name], _REAL[name]))


def _find_sites() -> list[tuple[Any, str, str]]:
    """Return where Headgate's modules refer to functions of `time`: module attributes and default arguments."""
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


def _replaced(value: Any, old: Any, new: Any) -> Any:
    return tuple(new if entry is old else entry for entry in value) if isinstance(value, tuple) else new
