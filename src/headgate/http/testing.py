"""Help for testing an application with limits: switch them off, give them a clock, start afresh.

    with limits_off(): ...                      every limit admits everything
    with fresh_limits(clock=clock): ...         every limit counts from zero, in memory, by this clock

With pytest, the fixture `headgate_limits` is such a block; without, `headgate.testing.frozen_limits` is. They reach every
limit of the process, wherever it was made, also those made inside of the block; nothing in the application has to know.
When the block ends, all is as it was before: whatever was counted inside is forgotten, and no store was asked.
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
    """The limits inside of a `fresh_limits` block."""

    def __init__(self, clock: Clock | None) -> None:
        self._clock = check_clock(clock)

    def advance(self, seconds: float) -> None:
        """Let time pass for them; they need a clock that can do so, a `FakeClock`."""
        advance = getattr(self._clock, "advance", None)
        if advance is None:
            raise ConfigError("these limits go by real time; give fresh_limits a FakeClock")
        advance(seconds)

    def reset(self) -> None:
        """Forget everything that was counted."""
        for limit in list(all_limits):
            limit.substitute(self.substitute(limit.limiter))

    def substitute(self, limiter: Any) -> Any:
        """Return a limiter that decides as this one does and has not counted anything yet."""
        return limiter.in_memory(self._clock)


@contextmanager
def fresh_limits(*, clock: Clock | None = None) -> Iterator[FreshLimits]:
    """Let every limit count from zero, in memory of its own, for the length of a block.

    Args:
        clock: Where time comes from, a `headgate.testing.FakeClock` for instance; by default real time.
    """
    fresh = FreshLimits(clock)
    with _substituted(fresh.substitute):
        yield fresh


@contextmanager
def limits_off() -> Iterator[None]:
    """Let every limit admit everything, for the length of a block."""
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
                limit.renew()  # made inside of the block, and perhaps still inside of another one
