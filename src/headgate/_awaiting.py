"""Answers that are still to be awaited, and that say so when they are not.

`if limiter.hit("alice"):` without `await` would be true for every caller: a coroutine is. These are coroutines too, for
`await`, `create_task`, `gather`, `wait_for` and task groups, but their truth value is an error.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from headgate._async.hold import AsyncHold

T = TypeVar("T")

MYPY = False  # mypy takes it to be true


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
            raise TypeError("this answer is still to be awaited: write `if await limiter.hit(key):`")


class AwaitingHold(Awaiting["AsyncHold"]):
    """A hold that is taken when it is awaited or entered."""

    __slots__ = ("_hold",)

    async def __aenter__(self) -> AsyncHold:
        self._hold = await self._coroutine
        return await self._hold.__aenter__()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._hold.__aexit__(exc_type, exc, tb)
