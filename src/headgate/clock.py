"""Clocks and conversions of time.

Inside Headgate time is a whole number of microseconds since the Unix epoch. Doubles, which Redis scripts count in, are
exact to 2^53: epoch microseconds fit until the year 2255, nanoseconds do not. Seconds exist only at the public edge, and
are converted with `round`, never with `int`: 1.001 seconds are 1,001,000 microseconds, not 1,000,999.

A clock also has methods to sleep, so that tests can let an hour pass without waiting.
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
    """Return seconds rounded to whole microseconds."""
    return round(seconds * MICROSECONDS)


def instant(now: float | None) -> int | None:
    """Convert the `now=` of a call from seconds since the epoch to microseconds.

    Raises:
        ConfigError: The time is not a number or out of range.
    """
    if now is None:
        return None
    if not is_number(now) or not 0 <= now < MAX_INSTANT:  # also false for NaN
        raise ConfigError(f"now= is seconds since the epoch, from 0 to the year 2255, not {now!r}")
    return to_microseconds(now)


def reading(clock: Clock) -> int:
    """Return the checked time of a user-supplied clock in microseconds since the epoch.

    Raises:
        ConfigError: The time is not a whole number or out of range.
    """
    now = clock.now_us()
    if type(now) is not int or not 0 <= now < 2**53:
        raise ConfigError(
            f"a clock returns whole microseconds since the epoch, from 0 to the year 2255; {clock!r} returned {now!r}"
        )
    return now


def time_limit(timeout: float | None) -> float | None:
    """Return the checked `timeout=` of a call, at least 0; `None` for no time-out.

    Raises:
        ConfigError: The time-out is not a number.
    """
    if timeout is None:
        return None
    if not is_number(timeout) or timeout != timeout:
        raise ConfigError(f"timeout= is seconds, or None to wait without limit, not {timeout!r}")
    return None if timeout >= MAX_INSTANT else max(0.0, timeout)


@runtime_checkable
class Clock(Protocol):
    """The interface of clocks."""

    def now_us(self) -> int:
        """Return the time in microseconds since the epoch."""

    def sleep(self, seconds: float) -> None:
        """Block until `seconds` have passed on this clock."""

    async def asleep(self, seconds: float) -> None:
        """Wait until `seconds` have passed on this clock, while other tasks run."""


def check_clock(clock: Clock | None) -> Clock | None:
    """Return the value of `clock=` if it is a clock or `None`."""
    expected = "an object with now_us, sleep and asleep, like headgate.testing.FakeClock()"
    return None if clock is None else check_kind("clock=", clock, Clock, expected)


class _RealTime:
    """Sleep methods in real time."""

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def asleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class SteadyClock(_RealTime):
    """A clock that starts at the wall-clock time and then follows the monotonic clock.

    Changes of the wall clock do not affect it. Two processes may disagree if the wall clock was corrected between their
    starts, so this clock is for state that lives in one process.
    """

    def __init__(self, monotonic_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.monotonic_ns = monotonic_ns
        self.is_of_system = monotonic_ns is time.monotonic_ns
        """Whether it follows the system's monotonic clock, not a fake one."""
        # Whole milliseconds, so that ticks of a millisecond are aligned on both scales.
        self.epoch_us = (time.time_ns() - monotonic_ns()) // 1_000_000 * 1000
        """Offset in microseconds from the monotonic clock to the epoch."""

    def now_us(self) -> int:
        return self.monotonic_ns() // 1000 + self.epoch_us


class WallClock(_RealTime):
    """The machine's wall clock, shared by all its processes."""

    def now_us(self) -> int:
        return time.time_ns() // 1000


def dating(clock: Clock) -> Clock:
    """Return the clock for comparisons with dates of other machines: the wall clock instead of a steady one.

    The steady clock does not follow when the machine's time is set or the machine is suspended.
    """
    return WallClock() if type(clock) is SteadyClock else clock
