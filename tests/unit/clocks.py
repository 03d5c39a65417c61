"""A clock for the quick way through the memory store."""

from __future__ import annotations

from headgate.clock import SteadyClock
from headgate.testing import FakeClock


def steady(clock: FakeClock) -> SteadyClock:
    """Return a clock that shows what a fake one does, from now on, and of the kind that never goes back.

    On any other kind a token bucket is decided the general way.
    """
    start = clock.now_us()
    made = SteadyClock(lambda: (clock.now_us() - start) * 1000)
    made.epoch_us = start
    return made
