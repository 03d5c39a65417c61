"""Primitives that differ between threads and tasks: events, timers, checks of guarded functions."""

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
    """An event that has one waiting thread. Setting it ends one wait, or the next one.

    Each method is a single call of a lock. So threads may call them at the same time, and a signal handler that raises
    leaves nothing locked. `threading.Event` does not guarantee this, because it is written in Python.

    Attributes:
        is_over: Set by the waiter when it stops waiting.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._blocker = threading.Lock()
        self._blocker.acquire()

    @property
    def is_dead(self) -> bool:
        """Whether the waiter has stopped waiting."""
        return self.is_over

    def set(self) -> bool:
        """Set the event; return false if the waiter has stopped waiting."""
        if self.is_over:
            return False
        try:
            self._blocker.release()
        except RuntimeError:
            return True  # it is set already
        return True

    def clear(self) -> None:
        """Reset the event."""
        self._blocker.acquire(blocking=False)

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds; return whether the event was set, and reset it."""
        return self._blocker.acquire(timeout=max(0, min(timeout, threading.TIMEOUT_MAX)))

    def time(self) -> float:
        """Return the time in seconds on the clock that `wait` uses."""
        return time.monotonic()


class AsyncEvent:
    """An event that has one waiting task, and may be set from another event loop.

    Attributes:
        is_over: Set by the waiter when it stops waiting.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._is_set = False
        self._event = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @property
    def is_dead(self) -> bool:
        """Whether the waiter has stopped waiting or its event loop was closed."""
        return self.is_over or self._loop.is_closed()

    def set(self) -> bool:
        """Set the event; return false if the waiter is dead."""
        if self.is_dead:
            return False
        if not self._is_set:
            self._is_set = True  # before the call: the waiter may run, and clear it, before the call returns
            try:
                self._loop.call_soon_threadsafe(self._event.set)
            except RuntimeError:  # closed since the check
                return False
        return True

    def clear(self) -> None:
        """Reset the event; the waiter calls this."""
        self._is_set = False  # first: a thread that sets it now must not be ignored
        self._event.clear()

    async def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds; return whether the event was set."""
        try:
            # Not wait_for: it may swallow a cancellation that comes together with the event.
            async with asyncio.timeout(timeout):
                await self._event.wait()
        except TimeoutError:
            return False
        return True

    def time(self) -> float:
        """Return the time in seconds on the clock that `wait` uses."""
        return self._loop.time()


def call_later(seconds: float, method: Callable[..., None], *args: object) -> bool:
    """Call a method in a timer thread after `seconds`, unless its object was garbage-collected before.

    Returns false if the thread cannot be started.
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
    """Like `call_later`, but in a task of the running event loop."""
    wanted = WeakMethod(method)
    loop = asyncio.get_running_loop()

    def call() -> None:
        found = wanted()
        if found is not None:
            _start(found(*args))

    # In an empty context, because the call does not belong to the request of the caller.
    loop.call_later(seconds, call, context=Context())
    return True


def run_without_waiting(work: Coroutine[Any, Any, Any]) -> None:
    """Run a coroutine up to its first wait, for a task that is being destroyed and cannot wait.

    This happens to tasks of a closed event loop. Work in memory is completed. A call that another event loop or thread
    has received is also completed there; anything else is dropped.
    """
    with contextlib.suppress(StopIteration, RuntimeError, HeadgateError):
        work.send(None)
    work.close()


async def complete(
    work: Coroutine[Any, Any, T], abandoned: Callable[[T], Awaitable[None]] | None = None
) -> T:
    """Return the result of work; if the caller is cancelled, finish the work and pass its result to `abandoned`."""
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
"""Strong references to running tasks: an event loop has only weak ones."""


def check_coroutine_function(function: object) -> None:
    """Refuse a function that `AsyncLimiter.guard` cannot decorate."""
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{function!r} is not a coroutine function; use Limiter.guard for it, "
            "or write guard(key=…) if it returns the key"
        )


def check_plain_function(function: object) -> None:
    """Refuse a function that `Limiter.guard` cannot decorate."""
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{function!r} is a coroutine function; use AsyncLimiter.guard for it")
    if not callable(function):
        raise ConfigError(f"{function!r} is not a function; a guard decorates functions")


def check_undecorated(function: object) -> None:
    """Refuse a lambda in the place of a function to guard: it is meant to return the key."""
    if getattr(function, "__name__", "") == "<lambda>":
        raise ConfigError("a function for the key needs its name: write @limiter.guard(key=lambda …)")


def qualified_name(function: Any) -> str:
    """Return the name of a function with its module."""
    own = getattr(function, "func", function)  # of a partial
    return f"{own.__module__}.{getattr(own, '__qualname__', type(own).__qualname__)}"
