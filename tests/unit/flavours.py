"""Helpers that call a `Limiter` or an `AsyncLimiter` from the same coroutine test."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from headgate import AsyncLimiter, Hold, Limiter

AnyLimiter = Limiter | AsyncLimiter
Flavour = type[Limiter] | type[AsyncLimiter]


async def done(result: Any) -> Any:
    """Return the result of a call; await it if it is awaitable."""
    return await result if inspect.isawaitable(result) else result


@asynccontextmanager
async def entered(manager: Any) -> AsyncIterator[Any]:
    """Enter a context manager of either kind."""
    if hasattr(manager, "__aenter__") and not isinstance(manager, Hold):
        async with manager as value:
            yield value
    else:
        with manager as value:
            yield value


async def close(limiter: AnyLimiter) -> None:
    """Close a limiter of either kind."""
    if isinstance(limiter, AsyncLimiter):
        await limiter.aclose()
    else:
        limiter.close()
