"""An asynchronous store as a synchronous one: each call is awaited on an event loop of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from headgate.rules import Rule
from headgate.stores.base import AsyncStore, Gate, Guarantees

P = ParamSpec("P")
T = TypeVar("T")


class BlockingStore:
    """Makes the calls of an asynchronous store, one after the other, for one thread.

    Attributes:
        store: The asynchronous store.
    """

    def __init__(self, store: AsyncStore) -> None:
        self.store = store
        self._runner = asyncio.Runner()
        self._process = os.getpid()

    @property
    def guarantees(self) -> Guarantees:
        return self.store.guarantees

    def bind(self, limiter: str, rules: tuple[Rule, ...]) -> Gate:
        gate = self.store.bind_async(limiter, rules)
        return Gate(
            self._blocking(gate.hit),
            self._blocking(gate.peek),
            self._blocking(gate.hold),
            self._blocking(gate.record),
            self._blocking(gate.refund),
            self._blocking(gate.reset),
        )

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something to its end on the loop."""
        if self._process != os.getpid():  # a fork: the parent's loop is not ours to run, nor to close
            self._process, self._runner = os.getpid(), asyncio.Runner()
        return self._runner.run(work)

    def change_loop(self) -> None:
        """Close the event loop and go on with another."""
        self._runner.close()
        self._runner = asyncio.Runner()

    def close(self) -> None:
        """Close the store and the loop."""
        self.run(self.store.aclose())
        self._runner.close()

    def _blocking(self, call: Callable[P, Awaitable[T]]) -> Callable[P, T]:
        async def work(*args: P.args, **kwargs: P.kwargs) -> T:
            return await call(*args, **kwargs)

        return lambda *args, **kwargs: self.run(work(*args, **kwargs))
