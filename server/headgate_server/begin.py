"""Running a coroutine without a task, as far as it does not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def begin(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> asyncio.Task[T] | None:
    """Run a coroutine up to where it first waits. Return the task that is the rest of it; `None` if it has ended.

    Up to there it is no task, so it cannot be cancelled and cannot have an `asyncio.timeout`.
    """
    try:
        awaited = work.send(None)
    except StopIteration:
        return None
    return loop.create_task(_rest_of(work, awaited))


async def _rest_of(work: Coroutine[Any, Any, T], awaited: Any) -> T:
    return await _resumed(work, awaited)


@coroutine
def _resumed(work: Coroutine[Any, Any, T], awaited: Any) -> Generator[Any, Any, T]:
    try:
        while True:
            try:
                result = yield awaited
            except BaseException as error:  # noqa: BLE001  # for the coroutine to see, as if it had waited itself
                awaited = work.throw(error)
            else:
                awaited = work.send(result)
    except StopIteration as stop:
        end: T = stop.value
        return end
