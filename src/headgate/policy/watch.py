"""Noticing that a policy file has changed, or that somebody asks for it to be read again (SIGHUP).

The file is read and compared every so often. It is small, and that notices what times and sizes do not: editors that
replace it, swapped links (as Kubernetes mounts its ConfigMaps), and a second change within one tick of the file system.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from headgate._checks import is_number
from headgate.errors import ConfigError
from headgate.policy.live import LiveLimiters

L = TypeVar("L")

_HANGUP: int | None = getattr(signal, "SIGHUP", None)
"""The signal; not every system has it."""


class Watching:
    """A thread that looks at a policy file; it ends with `stop`, with its `with` block, or with the process."""

    def __init__(self, look: Callable[[bool], None], every: float) -> None:
        self._look = look
        self._every = every
        # A simple queue, because a signal handler may put into it while it is being put into.
        self._calls: SimpleQueue[str] = SimpleQueue()
        self._restore = _on_hangup(lambda: self._calls.put("look"))
        self._thread = threading.Thread(target=self._run, name="headgate-policy", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it, and wait until it has ended. Any thread may call this, more than once."""
        self._calls.put("stop")
        # That thread itself may call this too, in what it calls when the policy has changed.
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._restore()

    def _run(self) -> None:
        call = ""
        while call != "stop":
            try:
                call = self._calls.get(timeout=self._every)
            except Empty:
                call = ""
            if call != "stop":
                self._look(bool(call))

    def __enter__(self) -> Watching:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


class AsyncWatched(LiveLimiters[L]):
    """A policy that a task keeps up to date with its file."""

    async def watch(self, every: float = 1.0) -> None:
        """Reload whenever the file changes, and on SIGHUP, until cancelled.

        A file that cannot be used is logged, and named in `last_error`; the policy before stays in force. Signals come
        to the main thread only; elsewhere the file alone is watched.

        Args:
            every: Seconds between two looks at the file.

        Raises:
            ConfigError: That is no time to wait.
        """
        self._followed()
        _check_pause(every)
        hung_up = asyncio.Event()
        with hangups(hung_up.set):
            while True:
                try:
                    async with asyncio.timeout(every):
                        await hung_up.wait()
                except TimeoutError:
                    pass
                asked = hung_up.is_set()
                hung_up.clear()
                self._look(asked)


class Watched(LiveLimiters[L]):
    """A policy that a thread keeps up to date with its file."""

    def watch(self, every: float = 1.0) -> Watching:
        """Reload whenever the file changes, and on SIGHUP, in a thread that ends with `stop()` or its `with` block.

        A file that cannot be used is logged, and named in `last_error`; the policy before stays in force. SIGHUP is heard if
        this is called in the main thread; elsewhere the file alone is watched.

        Args:
            every: Seconds between two looks at the file.

        Raises:
            ConfigError: That is no time to wait.
        """
        self._followed()
        _check_pause(every)
        return Watching(self._look, every)


def _check_pause(every: float) -> None:
    """Refuse what no thread can wait for."""
    if not is_number(every) or not 0 < every <= threading.TIMEOUT_MAX:  # also false for NaN
        raise ConfigError(f"every= is seconds above 0, not {every!r}")


@contextmanager
def hangups(tell: Callable[[], None]) -> Iterator[None]:
    """Call a function of the running event loop at every SIGHUP, within a block; in the main thread only."""
    loop = asyncio.get_running_loop()

    def tell_loop() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell)  # which also wakes it

    restore = _on_hangup(tell_loop)
    try:
        yield
    finally:
        restore()


# One handler serves all watchers: the first to stop must not take SIGHUP from the others, nor let it end the process.
_listeners: list[Callable[[], None]] = []
_before: Any = None
"""What handled the signal before."""


def _tell_all(*_: object) -> None:
    for tell in tuple(_listeners):
        tell()


def _on_hangup(tell: Callable[[], None]) -> Callable[[], None]:
    """Have a function called at every SIGHUP, and return what ends that.

    Outside of the main thread neither may set a handler: nothing is called, or the existing handler stays
    without a listener.
    """
    global _before
    if _HANGUP is None or not _is_main_thread():
        return lambda: None
    if signal.getsignal(_HANGUP) is not _tell_all:
        _before = signal.signal(_HANGUP, _tell_all)
    _listeners.append(tell)

    def end() -> None:
        with suppress(ValueError):  # it has ended already
            _listeners.remove(tell)
        if not _listeners and _is_main_thread() and signal.getsignal(_HANGUP) is _tell_all:
            # A handler that was not set from Python cannot be set again from there; the default is the nearest to it.
            signal.signal(_HANGUP, signal.SIG_DFL if _before is None else _before)

    return end


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
