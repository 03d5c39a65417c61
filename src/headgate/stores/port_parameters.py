"""Parameters of a rule for the ports of the algorithms in Lua and SQL: the number of its kind, and four numbers."""

from __future__ import annotations

from headgate.algorithms import (
    Algorithm,
    Calendar,
    Concurrent,
    FixedWindow,
    Penalty,
    SlidingWindow,
    TokenBucket,
)
from headgate.calendars import edges_around
from headgate.clock import Clock, WallClock
from headgate.quota import MAX_UNITS

PortParameters = tuple[int, int, int, int, int]

_GROWTH_BITS = 7
"""The growth of a penalty takes this many bits; each higher bit stands for a rule whose refusals it counts."""


def port_parameters(algorithm: Algorithm, now: int) -> tuple[PortParameters, int, int]:
    """Return the parameters of a rule, and the start and end of the time in which they are valid.

    The parameters of a calendar are the starts of three consecutive windows. The first two windows are the one of `now`
    and its nearer neighbour, because the server's time may differ.
    """
    match algorithm:
        case Calendar(_, limit, span, timezone):  # first, because it is needed at every call
            before, start, end, after = edges_around(span, timezone, now)
            middle = (start + end) // 2
            if now < middle:
                return (5, limit, before, start, end), start, middle
            return (5, limit, start, end, after), middle, end
        case FixedWindow(_, limit, period):
            return (1, limit, period, 0, 0), 0, MAX_UNITS
        case SlidingWindow(_, limit, width, lifetime):
            return (2, limit, width, lifetime, 0), 0, MAX_UNITS
        case TokenBucket(_, burst, n, d, tick):
            return (3, burst, n, d, tick), 0, MAX_UNITS
        case Concurrent(_, limit, lease):
            return (4, limit, lease, 0, 0), 0, MAX_UNITS
        case Penalty(_, limit, duration, growth, longest, watched):
            bits = sum(1 << index for index in watched)
            return (6, limit, duration, bits << _GROWTH_BITS | growth, longest), 0, MAX_UNITS
    raise AssertionError(f"no port of {algorithm!r}")


class ServerTime:
    """An estimate of the server's time: a local clock plus the last known difference."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = WallClock() if clock is None else clock
        self._ahead = 0

    def now(self) -> int:
        """Return the time in microseconds."""
        return self._clock.now_us() + self._ahead

    def correct(self, now: int) -> None:
        """Set the server's current time, so that later calls are not sent twice."""
        self._ahead = now - self._clock.now_us()
