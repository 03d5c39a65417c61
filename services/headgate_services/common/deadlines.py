"""How long a block of work may take in all, known to whatever waits inside of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

DEFAULT_LIMIT = 5.0
"""Seconds that a database has unless an operator says otherwise."""

_deadline: ContextVar[float] = ContextVar("deadline", default=float("inf"))


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Give a block so many seconds; a block around it may leave it less. Tasks that it starts have the same deadline."""
    token = _deadline.set(deadline_after(seconds))
    try:
        yield
    finally:
        _deadline.reset(token)


def time_left() -> float:
    """Return the seconds that `within` leaves; infinite outside of it."""
    return _deadline.get() - asyncio.get_running_loop().time()


def deadline_after(seconds: float) -> float:
    """Return the event loop's time after so many seconds, or the deadline of `within` if that comes first."""
    return min(_deadline.get(), asyncio.get_running_loop().time() + seconds)
