"""Run a coroutine without a task."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context, copy_context
from typing import Any


def run_without_task(
    work: Coroutine[Any, Any, object], loop: asyncio.AbstractEventLoop, in_progress: set[Any]
) -> None:
    """Run a coroutine until it first waits; it continues when the awaited future is done.

    A task would take longer than the work of most requests. Without one, `asyncio.timeout` does not work: code that needs it
    has to be awaited as a separate task. While the coroutine waits, `in_progress` contains an object that can cancel it.
    """
    context = copy_context()
    try:
        awaited = context.run(work.send, None)
    except (StopIteration, asyncio.CancelledError):
        return
    WaitingCoroutine(work, loop, in_progress, context).wait_for(awaited)


class WaitingCoroutine:
    """A coroutine that waits; it can be cancelled like a task."""

    __slots__ = ("_awaited", "_context", "_in_progress", "_is_cancelled", "_loop", "_work")

    def __init__(
        self,
        work: Coroutine[Any, Any, object],
        loop: asyncio.AbstractEventLoop,
        in_progress: set[Any],
        context: Context,
    ) -> None:
        self._work = work
        self._loop = loop
        self._in_progress = in_progress
        self._context = context
        self._is_cancelled = False

    def wait_for(self, awaited: Any) -> None:
        """Continue when a future is done; with `None`, in the next iteration of the event loop."""
        self._awaited = awaited
        self._in_progress.add(self)
        if awaited is None:
            self._loop.call_soon(self._continue, context=self._context)
        else:
            awaited._asyncio_future_blocking = False  # noqa: SLF001  # like a task, so that others may await it too
            awaited.add_done_callback(self._continue, context=self._context)

    def cancel(self, msg: str | None = None) -> None:
        """Raise `CancelledError` in the coroutine."""
        if self._awaited is None or not self._awaited.cancel(msg):
            self._is_cancelled = True

    def _continue(self, _: object = None) -> None:
        self._in_progress.discard(self)
        try:
            if self._is_cancelled:
                self._is_cancelled = False
                awaited = self._work.throw(asyncio.CancelledError())
            else:
                awaited = self._work.send(None)
        except (StopIteration, asyncio.CancelledError):
            return
        self.wait_for(awaited)
