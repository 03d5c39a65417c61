"""Wait until a server or a limiter has a certain state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def until(condition: Callable[[], object]) -> None:
    """Return when a condition is true; fail if that takes much too long.

    A server that is busy or just starting may drop a connection: that is not true yet.
    """
    deadline = time.monotonic() + 60
    while True:
        try:
            if condition():
                return
        except OSError:
            pass
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.02)


async def until_async(condition: Callable[[], bool]) -> None:
    """Return when other tasks or threads made a condition true; fail if that takes much too long."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # whatever it depends on has no event
            await asyncio.sleep(0.001)
