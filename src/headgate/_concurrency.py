"""What differs between threads and tasks: events, timers, and which functions can be guarded."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any
from weakref import WeakMethod

from headgate.errors import ConfigError


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
            task = loop.create_task(found(*args))
            _running.add(task)
            task.add_done_callback(_running.discard)

    # In a context of its own: it does not belong to the request of the caller.
    loop.call_later(seconds, call, context=Context())
    return True


_running: set[asyncio.Task[None]] = set()
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
