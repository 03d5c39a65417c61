"""What differs between threads and tasks: events, timers, and which functions can be guarded."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar
from weakref import WeakMethod

from headgate.errors import ConfigError, HeadgateError

logger = logging.getLogger("headgate")

T = TypeVar("T")


class Event:
    """Something that one thread waits for and another brings about, once.

    Waiting and setting are single calls of a lock. So a signal handler that raises in between, in either thread, leaves
    nothing locked, as it could inside of a `threading.Event`, which is written in Python.

    Attributes:
        is_over: Set by the waiter when it does not wait any more.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._is_set = False
        self._blocker = threading.Lock()
        self._blocker.acquire()

    def set(self) -> bool:
        """Bring it about; return false if there is no waiter any more. One thread at a time may call this."""
        if self.is_over:
            return False
        if not self._is_set:
            self._is_set = True
            self._blocker.release()
        return True

    def wait(self, timeout: float) -> bool:
        """Return whether it has happened, waiting up to so many seconds for it."""
        return self._is_set or self._blocker.acquire(timeout=max(0, timeout))

    def time(self) -> float:
        """Return the seconds on the clock that `wait` goes by."""
        return time.monotonic()


class AsyncEvent:
    """Something that one task waits for and another, perhaps of another event loop, brings about, once.

    Attributes:
        is_over: Set by the waiter when it does not wait any more.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._is_set = False
        self._event = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def set(self) -> bool:
        """Bring it about; return false if there is no waiter any more, also because its event loop was closed."""
        if self.is_over or self._loop.is_closed():
            return False
        if not self._is_set:
            try:
                self._loop.call_soon_threadsafe(self._event.set)
            except RuntimeError:  # closed in this moment
                return False
            self._is_set = True
        return True

    async def wait(self, timeout: float) -> bool:
        """Return whether it has happened, waiting up to so many seconds for it."""
        try:
            # Not wait_for: it may swallow a cancellation that comes together with the event.
            async with asyncio.timeout(timeout):
                await self._event.wait()
        except TimeoutError:
            return False
        return True

    def time(self) -> float:
        """Return the seconds on the clock that `wait` goes by."""
        return self._loop.time()


def call_later(seconds: float, method: Callable[..., None], *args: object) -> bool:
    """Call a method in a thread of its own after so many seconds, unless its object is gone by then.

    Returns whether it will be called: there may be no more threads to be had.
    """
    wanted = WeakMethod(method)

    def call() -> None:
        found = wanted()
        if found is not None:
            found(*args)

    timer = threading.Timer(seconds, call)
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError:
        return False
    return True


def call_later_async(seconds: float, method: Callable[..., Coroutine[Any, Any, None]], *args: object) -> bool:
    """As `call_later`, in a task of the running event loop."""
    wanted = WeakMethod(method)
    loop = asyncio.get_running_loop()

    def call() -> None:
        found = wanted()
        if found is not None:
            _start(found(*args))

    # In a context of its own: it does not belong to the request of the caller.
    loop.call_later(seconds, call, context=Context())
    return True


def run_without_waiting(work: Coroutine[Any, Any, Any]) -> None:
    """Run a coroutine up to where it would wait, for a caller that is being destroyed and cannot wait.

    This happens to tasks of an event loop that was closed. Work in memory is completed, and what was handed to a store in
    another event loop or thread goes on; anything else is dropped.
    """
    with contextlib.suppress(StopIteration, RuntimeError, HeadgateError):
        work.send(None)
    work.close()


async def complete(
    work: Coroutine[Any, Any, T], abandoned: Callable[[T], Awaitable[None]] | None = None
) -> T:
    """Return the result of work that goes on if the caller is cancelled; `abandoned` gets the result then."""
    task = _start(work)
    try:
        await asyncio.wait((task,))
    except asyncio.CancelledError:
        _start(_look_after(task, abandoned))
        raise
    return task.result()


async def _look_after(task: asyncio.Task[T], abandoned: Callable[[T], Awaitable[None]] | None) -> None:
    try:
        result = await task
        if abandoned is not None:
            await abandoned(result)
    except HeadgateError as error:
        logger.warning("a cancelled call could not be completed: %s", error)


def _start(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    task = asyncio.get_running_loop().create_task(work)
    _running.add(task)
    task.add_done_callback(_running.discard)
    return task


_running: set[asyncio.Task[Any]] = set()
"""An event loop alone does not keep its tasks."""


def check_coroutine_function(function: object) -> None:
    """Refuse what `AsyncLimiter.guard` cannot guard."""
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"{function!r} is not a coroutine function; use Limiter.guard for it")


def check_plain_function(function: object) -> None:
    """Refuse what `Limiter.guard` cannot guard."""
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{function!r} is a coroutine function; use AsyncLimiter.guard for it")
    if not callable(function):
        raise ConfigError(f"{function!r} is not a function; write @limiter.guard(...) with its brackets")
