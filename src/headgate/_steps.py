"""Run a generator in a thread or in a task, so that code that waits between its steps is written once.

The generator has no I/O. It yields each step that may have to wait, and is sent the step's result or thrown its exception.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Generator
from typing import Any, TypeVar

S = TypeVar("S")
T = TypeVar("T")

Steps = Generator[Any, Any, Any]


def _itself(step: Any) -> Any:
    return step


def run(steps: Generator[S, Any, T], execute: Callable[[S], Any] = _itself) -> T:
    """Run all steps in this thread, and return the generator's return value.

    Args:
        steps: The generator.
        execute: Returns the result of a step; by default a step is its result.
    """
    resume: Callable[[Any], S] = steps.send
    result: Any = None
    try:
        while True:
            step = resume(result)
            try:
                resume, result = steps.send, execute(step)
            except Exception as error:  # noqa: BLE001  # raised again inside the generator
                resume, result = steps.throw, error
    except StopIteration as end:
        returned: T = end.value
        return returned


async def run_async(steps: Generator[S, Any, T], execute: Callable[[S], Any] = _itself) -> T:
    """Like `run`, but await the results that are awaitable."""
    resume: Callable[[Any], S] = steps.send
    result: Any = None
    while True:
        try:
            step = resume(result)
        except StopIteration as end:
            returned: T = end.value
            return returned
        try:
            executed = execute(step)
            resume, result = steps.send, await executed if inspect.isawaitable(executed) else executed
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  # as in `run`
            resume, result = steps.throw, error
