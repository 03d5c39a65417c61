"""Budgets for threads and tasks, and their calls."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Unpack

from headgate import AsyncLimiter, Limiter
from headgate._checks import check_kind
from headgate._concurrency import run_without_waiting
from headgate._steps import run, run_async
from headgate.keys import Key
from headgate.llm.budget import BudgetBase, BudgetOptions, CallBase
from headgate.llm.usage import Usage


class Budget(BudgetBase[Limiter]):
    """The budget of a provider account, for threads: `with budget.call("model", estimated=request) as call:`."""

    def __init__(self, limiter: Limiter, **options: Unpack[BudgetOptions]) -> None:
        super().__init__(check_kind("limiter", limiter, Limiter, "a Limiter"), **options)

    def call(
        self,
        model: str,
        estimated: Usage | Mapping[str, Any] | None = None,
        *,
        key: Key | None = None,
        timeout: float | None = None,
    ) -> BudgetCall:
        """Hold the estimated usage of a call during a `with` block; wait until it is available.

        Args:
            model: The model.
            estimated: A `Usage`, or the request from which it is estimated.
            key: The key to count by; by default that of the budget for the model.
            timeout: The longest wait in seconds; by default `max_wait` of the budget.

        Raises:
            RateLimited: On entry: the units would not be available in time.
            CostTooHigh: On entry: the estimate exceeds the capacity of a rule.
        """
        return BudgetCall(self, model, estimated, key, timeout)


class AsyncBudget(BudgetBase[AsyncLimiter]):
    """Like `Budget`, but for tasks: `async with budget.call("model", estimated=request) as call:`."""

    def __init__(self, limiter: AsyncLimiter, **options: Unpack[BudgetOptions]) -> None:
        super().__init__(check_kind("limiter", limiter, AsyncLimiter, "an AsyncLimiter"), **options)

    def call(
        self,
        model: str,
        estimated: Usage | Mapping[str, Any] | None = None,
        *,
        key: Key | None = None,
        timeout: float | None = None,
    ) -> AsyncBudgetCall:
        """See `Budget.call`."""
        return AsyncBudgetCall(self, model, estimated, key, timeout)


class BudgetCall(CallBase):
    """A call to a model in a thread; see `Budget.call`.

    The end of the block settles the hold once: at the usage given to `settle`; otherwise at the progress of the stream;
    otherwise at the estimate. A call that failed with an exception other than a time-out counts as one request without
    tokens.
    """

    def report(self, headers: Mapping[str, str]) -> None:
        """Correct the limiter downwards by the limits in the header fields of a response."""
        run(self._budget.correct(self, headers))

    def __enter__(self) -> BudgetCall:
        run(self._open())
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        run(self._close(exc))


class AsyncBudgetCall(CallBase):
    """A call to a model in a task; see `BudgetCall`."""

    async def report(self, headers: Mapping[str, str]) -> None:
        """See `BudgetCall.report`."""
        await run_async(self._budget.correct(self, headers))

    async def __aenter__(self) -> AsyncBudgetCall:
        await run_async(self._open())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        closing = run_async(self._close(exc))
        if exc is None or isinstance(exc, Exception):
            await closing
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # the event loop was closed, and the coroutine is being destroyed
            run_without_waiting(closing)
            return
        # A cancelled task may be cancelled again, and a generator that is being closed may not be able to wait.
        task = loop.create_task(closing)
        _closing.add(task)  # the event loop keeps only a weak reference
        task.add_done_callback(_closing.discard)
        if not isinstance(exc, GeneratorExit):
            await asyncio.shield(task)


_closing: set[asyncio.Task[Any]] = set()
