"""What is done for a request, written once for threads and tasks.

A generator yields each step that may have to wait. In a thread the step is done when it is yielded, and is its own result.
In a task it may be an awaitable, whose result or exception comes back into the generator.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Generator
from typing import Any

Steps = Generator[Any, Any, Any]


def run(steps: Steps) -> Any:
    """Do all steps in this thread, and return what they return."""
    step = None
    try:
        while True:
            step = steps.send(step)
    except StopIteration as end:
        return end.value


async def run_async(steps: Steps) -> Any:
    """Await all steps, and return what they return."""
    resume, result = steps.send, None
    while True:
        try:
            step = resume(result)
        except StopIteration as end:
            return end.value
        try:
            resume, result = steps.send, await step if inspect.isawaitable(step) else step
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  # the steps see to it
            resume, result = steps.throw, error
