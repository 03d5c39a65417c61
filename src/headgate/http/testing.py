"""Helpers for testing an application with limits: switch them off, set their clock, or reset their counts.

    with limits_off(): ...                      every limit admits everything
    with fresh_limits(clock=clock): ...         every limit counts from zero, in memory, by this clock

With pytest, use the fixture `headgate_limits` for such a block; without pytest, `headgate.testing.frozen_limits`. They apply
to every limit of the process, including limits created inside the block; the application needs no changes. At the end of the
block the previous state is restored: counts made inside are discarded, and no store was contacted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from headgate import AsyncLimiter, Limiter
from headgate.clock import Clock, check_clock
from headgate.errors import ConfigError
from headgate.http.limit import all_limits, substitutes

__all__ = ["FreshLimits", "fresh_limits", "limits_off"]


class FreshLimits:
    """The limits inside a `fresh_limits` block."""

    def __init__(self, clock: Clock | None) -> None:
        self._clock = check_clock(clock)

    def advance(self, seconds: float) -> None:
        """Advance the clock of the limits; it must be a `FakeClock`."""
        advance = getattr(self._clock, "advance", None)
        if advance is None:
            raise ConfigError("these limits use real time; pass fresh_limits a FakeClock")
        advance(seconds)

    def reset(self) -> None:
        """Reset all counts."""
        for limit in list(all_limits):
            limit.substitute(self.substitute(limit.limiter))

    def substitute(self, limiter: Any) -> Any:
        """Return a limiter with the same rules and no counts."""
        return limiter._in_memory(self._clock)


@contextmanager
def fresh_limits(*, clock: Clock | None = None) -> Iterator[FreshLimits]:
    """Make every limit count from zero, in separate memory, inside the block.

    Args:
        clock: The clock to use, for example a `headgate.testing.FakeClock`; by default real time.
    """
    fresh = FreshLimits(clock)
    with _substituted(fresh.substitute):
        yield fresh


@contextmanager
def limits_off() -> Iterator[None]:
    """Make every limit admit everything inside the block."""
    with _substituted(lambda limiter: AsyncLimiter() if isinstance(limiter, AsyncLimiter) else Limiter()):
        yield


@contextmanager
def _substituted(substitute: Callable[[Any], Any]) -> Iterator[None]:
    before = WeakKeyDictionary({limit: limit.substituted for limit in all_limits})
    substitutes.append(substitute)
    try:
        for limit in list(all_limits):
            limit.renew()
        yield
    finally:
        substitutes.remove(substitute)
        for limit in list(all_limits):
            if limit in before:
                limit.substitute(before[limit])
            else:
                limit.renew()  # the limit is new; an outer block may still be active
