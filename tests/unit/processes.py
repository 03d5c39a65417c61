"""Forks and signals, for tests of what they do to a limiter."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import pytest

SECONDS_TO_LIVE = 30

forking = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
"""Marks tests that fork: Python 3.12 warns of forks beside threads, and that is what they are about."""


@contextmanager
def untraced() -> Iterator[None]:
    """Leave a block out of what measures coverage: that has locks of its own, which no fork or signal may come across."""
    tracing = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(tracing)


def fork(work: Callable[[], bool]) -> int:
    """Do the work in a child, which is killed if it hangs, and return its process id."""
    with untraced() if threading.active_count() > 1 else nullcontext():
        child = os.fork()
        if child == 0:
            run_and_exit(work)
    return child


def run_and_exit(work: Callable[[], bool]) -> NoReturn:
    """Do the work and end this process."""
    signal.alarm(SECONDS_TO_LIVE)
    threading.settrace(None)  # threads of the child are not traced either
    right = False
    try:
        right = work()
    finally:
        os._exit(0 if right else 1)


def came_out_right(*children: int) -> bool:
    """Wait for all children and return whether the work of each came out right."""
    statuses = [os.waitpid(child, 0)[1] for child in children]
    return all(os.waitstatus_to_exitcode(status) == 0 for status in statuses)


def in_child(work: Callable[[], bool]) -> bool:
    """Return whether the work came out right in a child."""
    return came_out_right(fork(work))


def interrupt_until(event: threading.Event, thread: int) -> None:
    """Send signals to a thread until its handler sets an event.

    A signal that arrives just before the thread waits for a lock is handled after that wait, so one may not be enough.
    """
    while not event.wait(0.05):
        signal.pthread_kill(thread, signal.SIGUSR1)


class Interrupted(Exception):
    """What a signal handler raised, in the middle of whatever was going on."""


@contextmanager
def interrupts() -> Iterator[Callable[[float], None]]:
    """A function that interrupts this thread after so many seconds; after 0, not any more."""

    def interrupt_after(seconds: float) -> None:
        # Once more after a second: what is raised in a finalizer is lost, and CPython 3.11 may not notice a signal until
        # the next one comes.
        signal.setitimer(signal.ITIMER_REAL, seconds, 1)

    def interrupt(*_: object) -> None:
        raise Interrupted

    def mention(lost: Any) -> None:
        # In a finalizer or a callback, such as that of hypothesis for the collector, it reaches no caller: that is how
        # the interpreter works, and no failure of this test.
        if not isinstance(lost.exc_value, Interrupted):
            usual(lost)

    gc.collect()  # what other tests have left would be finalized meanwhile
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    usual, sys.unraisablehook = sys.unraisablehook, mention
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        # A tracer, such as that of coverage, opens gaps for signals where the interpreter alone has none.
        with untraced():
            yield interrupt_after
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = usual
        gc.callbacks[:] = callbacks


Interruptions = Callable[[Callable[[], object]], Iterator[None]]
"""The fixture `interruptions`: calls a function until a signal interrupts it, again and again."""
