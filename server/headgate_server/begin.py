"""Running a coroutine without a task."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context, copy_context
from typing import Any


def begin(work: Coroutine[Any, Any, object], loop: asyncio.AbstractEventLoop, under_way: set[Any]) -> None:
    """Run a coroutine up to where it first waits; what it waits for then lets it go on.

    It is no task, which would take longer than most requests have to do. So it cannot have an `asyncio.timeout`; what needs
    one has to be awaited as a task of its own. As long as it waits it is in `under_way`, as something that can be cancelled.
    """
    context = copy_context()
    try:
        awaited = context.run(work.send, None)
    except (StopIteration, asyncio.CancelledError):
        return
    Waiting(work, loop, under_way, context).wait_for(awaited)


class Waiting:
    """A coroutine that has begun and waits; it can be cancelled like a task."""

    __slots__ = ("_awaited", "_context", "_is_cancelled", "_loop", "_under_way", "_work")

    def __init__(
        self,
        work: Coroutine[Any, Any, object],
        loop: asyncio.AbstractEventLoop,
        under_way: set[Any],
        context: Context,
    ) -> None:
        self._work = work
        self._loop = loop
        self._under_way = under_way
        self._context = context
        self._is_cancelled = False

    def wait_for(self, awaited: Any) -> None:
        """Go on when that is done: a future, or `None` for the next turn of the event loop."""
        self._awaited = awaited
        self._under_way.add(self)
        if awaited is None:
            self._loop.call_soon(self._go_on, context=self._context)
        else:
            awaited._asyncio_future_blocking = False  # noqa: SLF001  # as a task does, so that others may await it too
            awaited.add_done_callback(self._go_on, context=self._context)

    def cancel(self, msg: str | None = None) -> None:
        """Raise `CancelledError` where it waits."""
        if self._awaited is None or not self._awaited.cancel(msg):
            self._is_cancelled = True

    def _go_on(self, _: object = None) -> None:
        self._under_way.discard(self)
        try:
            if self._is_cancelled:
                self._is_cancelled = False
                awaited = self._work.throw(asyncio.CancelledError())
            else:
                awaited = self._work.send(None)
        except (StopIteration, asyncio.CancelledError):
            return
        self.wait_for(awaited)
