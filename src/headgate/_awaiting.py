"""Answers that are still to be awaited, and that say so when they are not.

`if limiter.hit("alice"):` without `await` would be true for every caller: a coroutine is. These are coroutines too, for
`await`, `create_task`, `gather`, `wait_for` and task groups, but their truth value is an error.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any, NoReturn, TypeVar

from headgate.decision import Decision
from headgate.stores.base import AsyncGate
from headgate.stores.request import Request

T = TypeVar("T")

MYPY = False  # mypy takes it to be true

NOT_AWAITED = "this answer is still to be awaited: write `if await limiter.hit(key):`"


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
            self._coroutine.close()
            raise TypeError(NOT_AWAITED)
