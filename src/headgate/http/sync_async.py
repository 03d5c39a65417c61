"""Run the same generator in a thread or in a task, so that request handling is written once.

The generator yields each step that may have to wait. In a thread the yielded value is already the result. In a task it may
be an awaitable, whose result or exception is sent back into the generator.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Generator
from typing import Any

Steps = Generator[Any, Any, Any]


def run(steps: Steps) -> Any:
    """Run all steps in this thread, and return the generator's return value."""
    step = None
    try:
        while True:
            step = steps.send(step)
    except StopIteration as end:
        return end.value


async def run_async(steps: Steps) -> Any:
    """Await all steps, and return the generator's return value."""
    resume, result = steps.send, None
    while True:
        try:
            step = resume(result)
        except StopIteration as end:
            return end.value
        try:
            resume, result = steps.send, await step if inspect.isawaitable(step) else step
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  # raised again inside the generator
            resume, result = steps.throw, error
