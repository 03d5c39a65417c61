"""A result that is kept for a second and shared by concurrent calls.

For checks without access control, such as those of `/readyz`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any, Generic, TypeVar

__all__ = ["KEPT_SECONDS", "KeptResult"]

T = TypeVar("T")

KEPT_SECONDS = 1.0
"""Seconds for which a result is kept."""


class KeptResult(Generic[T]):
    """The result of a coroutine function; calls during a run share it.

    Args:
        compute: The coroutine function.
    """

    def __init__(self, compute: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._compute = compute
        self._run: asyncio.Task[T] | None = None
        self._ended_at = 0.0

    async def get(self) -> T:
        """Return the last result, or a new one if that is too old; exceptions are passed on."""
        run = self._run
        if run is None or (run.done() and monotonic() - self._ended_at >= KEPT_SECONDS):
            run = self._run = asyncio.ensure_future(self._new())
        return await asyncio.shield(run)

    def forget(self) -> None:
        """Compute the result again at the next call."""
        self._run = None

    async def _new(self) -> T:
        try:
            return await self._compute()
        finally:
            self._ended_at = monotonic()
