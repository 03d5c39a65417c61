"""Answers that are still to be awaited, and that say so when they are not.

`if limiter.hit("alice"):` without `await` would be true for every caller: a coroutine is. These are coroutines too, for
`await`, `create_task`, `gather`, `wait_for` and task groups, but their truth value is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Coroutine, Generator
from types import FrameType
from typing import Any, NoReturn, TypeVar

from headgate.decision import Decision
from headgate.stores.base import AsyncGate
from headgate.stores.request import Request

T = TypeVar("T")

MYPY = False  # mypy takes it to be true

NOT_AWAITED = "this answer is still to be awaited: write `if await limiter.hit(key):`"


def is_asked_by_asyncio() -> bool:
    """Return whether a truth value is asked for by asyncio.

    Since Python 3.12 it does so where it describes a task, to see whether the task has a coroutine.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") in ("headgate._asking", "headgate._awaiting"):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "asyncio.base_tasks"


async def decided(gate: AsyncGate, request: Request) -> Decision:
    """Return the decision of a gate."""
    return (await gate.ask(request))[0]


class Awaiting(Coroutine[Any, Any, T]):
    """An answer of an `AsyncLimiter`, to be awaited once."""

    __slots__ = ("_coroutine",)

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, None, T]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        """Run up to the next step, as an event loop does."""
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an exception where it waits."""
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """End it without an answer."""
        self._coroutine.close()

    # Pyright objects to `if limiter.hit(key):` because of the NoReturn. Mypy would take what follows to be unreachable, and
    # stop checking it; not knowing of the method, it objects under `--enable-error-code truthy-bool`.
    if not MYPY:

        def __bool__(self) -> NoReturn:
            if is_asked_by_asyncio():
                return True  # type: ignore[misc]  # to everybody else it is an error
            self._coroutine.close()
            raise TypeError(NOT_AWAITED)
