"""How the rules are described to the ports of the algorithms, in Lua and in SQL: the number of a kind, and four numbers."""

from __future__ import annotations

from headgate.algorithms import Algorithm, Calendar, Concurrent, FixedWindow, SlidingWindow, TokenBucket
from headgate.calendars import edges_around
from headgate.clock import Clock, WallClock
from headgate.quota import MAX_UNITS

Shape = tuple[int, int, int, int, int]


def shape_of(algorithm: Algorithm, now: int) -> tuple[Shape, int, int]:
    """Return what is sent to a server about a rule, and since and until when that is right.

    Of a calendar it is where three windows begin that follow each other. Of the first two, one is that of `now`, and the
    other is the nearer one of those beside it: the server's time may differ.
    """
    match algorithm:
        case Calendar(_, limit, span, timezone):  # first, because it is asked for at every call
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
    raise AssertionError(f"no port of {algorithm!r}")


class ServerTime:
    """What time it probably is at a server: that of a clock here, unless the server has said otherwise."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = WallClock() if clock is None else clock
        self._ahead = 0

    def now(self) -> int:
        """Return the time in microseconds."""
        return self._clock.now_us() + self._ahead

    def correct(self, now: int) -> None:
        """Hear from the server, so that not every call has to leave twice."""
        self._ahead = now - self._clock.now_us()
