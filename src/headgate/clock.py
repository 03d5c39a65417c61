"""Where time comes from.

Inside Headgate time is a whole number of microseconds since the Unix epoch. Doubles, which Redis scripts count in, are
exact to 2^53: epoch microseconds fit until the year 2255, nanoseconds do not. Seconds exist only at the public edge, and
get there by `round`, never by `int`: 1.001 seconds are 1,001,000 microseconds, not 1,000,999.

A clock also knows how to sleep, so that a test can pass an hour without waiting for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from headgate._checks import check_kind, is_number
from headgate.errors import ConfigError

__all__ = ["MAX_INSTANT", "MICROSECONDS", "Clock", "SteadyClock", "WallClock", "to_microseconds"]

MICROSECONDS = 1_000_000
"""Microseconds in a second."""

MAX_INSTANT = 2**53 // MICROSECONDS
"""Seconds since the epoch up to which microseconds are exact in a double."""


def to_microseconds(seconds: float) -> int:
    """Return seconds as whole microseconds, to the nearest one."""
    return round(seconds * MICROSECONDS)


def instant(now: float | None) -> int | None:
    """Return a caller's time in seconds since the epoch as microseconds.

    Raises:
        ConfigError: It is no time that every store can count.
    """
    if now is None:
        return None
    if not is_number(now) or not 0 <= now < MAX_INSTANT:  # also false for NaN
        raise ConfigError(f"now= is seconds since the epoch, from 0 to the year 2255, not {now!r}")
    return to_microseconds(now)


def reading(clock: Clock) -> int:
    """Return what a clock says, which may be anybody's, in microseconds since the epoch.

    Raises:
        ConfigError: It is no time that every store can count.
    """
    now = clock.now_us()
    if type(now) is not int or not 0 <= now < 2**53:
        raise ConfigError(
            f"a clock says whole microseconds since the epoch, from 0 to the year 2255, but {clock!r} said {now!r}"
        )
    return now


def time_limit(timeout: float | None) -> float | None:
    """Return the most seconds that a caller will wait, at least 0; `None` for any number of them.

    Raises:
        ConfigError: It is not a number.
    """
    if timeout is None:
        return None
    if not is_number(timeout) or timeout != timeout:
        raise ConfigError(f"timeout= is seconds, or None to wait for as long as it takes, not {timeout!r}")
    return None if timeout >= MAX_INSTANT else max(0.0, timeout)


@runtime_checkable
class Clock(Protocol):
    """What Headgate asks of a clock."""

    def now_us(self) -> int:
        """Return the time in microseconds since the epoch."""

    def sleep(self, seconds: float) -> None:
        """Block until so much time has passed on this clock."""

    async def asleep(self, seconds: float) -> None:
        """Wait until so much time has passed on this clock, letting other tasks run."""


def check_clock(clock: Clock | None) -> Clock | None:
    """Return the clock that was given, if any; refuse what is no clock."""
    expected = "an object with now_us, sleep and asleep, like headgate.testing.FakeClock()"
    return None if clock is None else check_kind("clock=", clock, Clock, expected)


class _RealTime:
    """Sleeping as everybody else does."""

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def asleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class SteadyClock(_RealTime):
    """The epoch at the start, plus what has passed since on the monotonic clock.

    Stepping the machine's wall clock neither blocks nor grants anything. Two processes may differ by as much as the wall
    clock was corrected between their starts, so this clock is for state that lives in one process.
    """

    def __init__(self, monotonic_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.monotonic_ns = monotonic_ns
        self.is_of_system = monotonic_ns is time.monotonic_ns
        """Whether it goes by the system's monotonic clock, not by one of a test."""
        # Whole milliseconds, so that ticks of a millisecond begin and end on both scales together.
        self.epoch_us = (time.time_ns() - monotonic_ns()) // 1_000_000 * 1000
        """Add this to the monotonic reading in microseconds for those since the epoch."""

    def now_us(self) -> int:
        return self.monotonic_ns() // 1000 + self.epoch_us


class WallClock(_RealTime):
    """The machine's wall clock, which all processes on it share."""

    def now_us(self) -> int:
        return time.time_ns() // 1000


def dating(clock: Clock) -> Clock:
    """Return the clock to compare the dates of others with: the wall clock in place of a steady one.

    The steady clock does not follow when the machine's time is set or the machine is suspended; the clocks of others do.
    """
    return WallClock() if type(clock) is SteadyClock else clock
