"""A clock for tests."""

from __future__ import annotations

import asyncio
from math import inf

from headgate._checks import is_number
from headgate.clock import to_microseconds
from headgate.errors import ConfigError


class FakeClock:
    """A clock for tests: it moves only by `advance`, `set` or by sleeping on it.

    Args:
        now: The start time, in seconds since the epoch.
    """

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.set(now)

    def now_us(self) -> int:
        return self._now_us

    @property
    def now(self) -> float:
        """The time in seconds since the epoch."""
        return self._now_us / 1_000_000

    def advance(self, seconds: float) -> None:
        """Advance the clock; a negative number moves it back."""
        self._now_us += _microseconds(seconds)

    def advance_us(self, microseconds: int) -> None:
        """Advance the clock by whole microseconds."""
        self.set_us(self._now_us + _whole(microseconds))

    def set(self, now: float) -> None:
        """Set the clock to a time in seconds since the epoch."""
        self._now_us = _microseconds(now)

    def set_us(self, now_us: int) -> None:
        """Set the clock to a time in microseconds since the epoch."""
        self._now_us = _whole(now_us)

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    async def asleep(self, seconds: float) -> None:
        self.advance(seconds)
        await asyncio.sleep(0)


def _whole(microseconds: int) -> int:
    if type(microseconds) is not int:
        raise ConfigError(f"a time is whole microseconds, not {microseconds!r}")
    return microseconds


def _microseconds(seconds: float) -> int:
    if not is_number(seconds) or not -inf < seconds < inf:  # also false for NaN
        raise ConfigError(f"a time is a number of seconds, not {seconds!r}")
    return to_microseconds(seconds)
