"""A clock for the fast path of the memory store."""

from __future__ import annotations

from headgate.clock import SteadyClock
from headgate.testing import FakeClock


def steady(clock: FakeClock) -> SteadyClock:
    """Return a steady clock that follows a fake clock from now on.

    With any other kind of clock, a token bucket is decided by the general path.
    """
    start = clock.now_us()
    made = SteadyClock(lambda: (clock.now_us() - start) * 1000)
    made.epoch_us = start
    return made
