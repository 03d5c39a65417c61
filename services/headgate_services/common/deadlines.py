"""Deadlines for blocks of code, known to everything that waits inside the block."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

DEFAULT_LIMIT = 5.0
"""Default time limit for a database, in seconds."""

_deadline: ContextVar[float] = ContextVar("deadline", default=float("inf"))


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Limit a block to `seconds`, or less if an outer block ends earlier. Tasks started inside have the same deadline."""
    token = _deadline.set(deadline_after(seconds))
    try:
        yield
    finally:
        _deadline.reset(token)


def time_left() -> float:
    """Return the seconds until the deadline of `within`; infinite outside of a block."""
    return _deadline.get() - asyncio.get_running_loop().time()


def deadline_after(seconds: float) -> float:
    """Return the event loop's time after `seconds`, or the deadline of `within` if that is earlier."""
    return min(_deadline.get(), asyncio.get_running_loop().time() + seconds)
