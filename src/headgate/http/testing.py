"""Help for testing an application with limits: switch them off, give them a clock, start afresh.

    with limits_off(): ...                      every limit admits everything
    with fresh_limits(clock=clock): ...         every limit counts from zero, in memory, by this clock

Both reach every limit of the process, wherever it was made, also those made inside of the block; nothing in the application
has to know. When the block ends, all is as it was before: whatever was counted inside is forgotten, and no store was asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from headgate import AsyncLimiter, Limiter
from headgate.clock import Clock
from headgate.http.limit import all_limits, stand_ins


class FreshLimits:
    """The limits inside of a `fresh_limits` block."""

    def __init__(self, clock: Clock | None) -> None:
        self._clock = clock

    def reset(self) -> None:
        """Forget everything that was counted."""
        for limit in list(all_limits):
            limit.use(self.stand_in(limit.own))

    def stand_in(self, limiter: Any) -> Any:
        """Return a limiter with the same rules that has not counted anything yet."""
        return _kind(limiter)(*limiter.rules, clock=self._clock)


@contextmanager
def fresh_limits(*, clock: Clock | None = None) -> Iterator[FreshLimits]:
    """Let every limit count from zero, in memory of its own, for the length of a block.

    Args:
        clock: Where time comes from, a `headgate.testing.FakeClock` for instance; by default real time.
    """
    fresh = FreshLimits(clock)
    with _standing_in(fresh.stand_in):
        yield fresh


@contextmanager
def limits_off() -> Iterator[None]:
    """Let every limit admit everything, for the length of a block."""
    with _standing_in(lambda limiter: _kind(limiter)()):
        yield


def _kind(limiter: Any) -> type[AsyncLimiter] | type[Limiter]:
    return AsyncLimiter if isinstance(limiter, AsyncLimiter) else Limiter


@contextmanager
def _standing_in(stand_in: Callable[[Any], Any]) -> Iterator[None]:
    before = {id(limit): limit.limiter for limit in all_limits}
    stand_ins.append(stand_in)
    for limit in list(all_limits):
        limit.use(stand_in(limit.own))
    try:
        yield
    finally:
        stand_ins.remove(stand_in)
        for limit in list(all_limits):
            limit.use(before.get(id(limit), limit.own))
