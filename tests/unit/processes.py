"""Helpers for tests that fork or send signals while a limiter works."""

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
"""Marks tests that fork: they ignore the warning of Python 3.12 about forks in a process with threads."""


@contextmanager
def untraced() -> Iterator[None]:
    """Disable coverage tracing in a block: the tracer has its own locks, and a fork or signal could leave them locked."""
    tracing = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(tracing)


def fork(work: Callable[[], bool]) -> int:
    """Do the work in a child process, which is killed if it hangs, and return its process id."""
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


def all_succeeded(*children: int) -> bool:
    """Wait for all child processes and return whether each of them succeeded."""
    statuses = [os.waitpid(child, 0)[1] for child in children]
    return all(os.waitstatus_to_exitcode(status) == 0 for status in statuses)


def in_child(work: Callable[[], bool]) -> bool:
    """Do the work in a child process and return whether it succeeded."""
    return all_succeeded(fork(work))


def interrupt_until(event: threading.Event, thread: int) -> None:
    """Send signals to a thread until its handler sets an event.

    A signal that arrives just before the thread waits for a lock is handled after that wait, so one may not be enough.
    """
    while not event.wait(0.05):
        signal.pthread_kill(thread, signal.SIGUSR1)


class Interrupted(Exception):
    """Raised by the signal handler at any point of the code under test."""


@contextmanager
def interrupts() -> Iterator[Callable[[float], None]]:
    """A function that interrupts this thread after the given number of seconds; 0 cancels the interruption."""

    def interrupt_after(seconds: float) -> None:
        # Repeat after a second: an exception in a finalizer is lost, and CPython 3.11 may not notice a signal until the
        # next one arrives.
        signal.setitimer(signal.ITIMER_REAL, seconds, 1)

    def interrupt(*_: object) -> None:
        raise Interrupted

    def report_unless_interrupted(lost: Any) -> None:
        # An exception in a finalizer or a callback (hypothesis has one for the garbage collector) reaches no caller.
        # The interpreter works like this, so the test does not fail.
        if not isinstance(lost.exc_value, Interrupted):
            usual(lost)

    gc.collect()  # otherwise, objects of earlier tests are finalized during this test
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    usual, sys.unraisablehook = sys.unraisablehook, report_unless_interrupted
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        # A tracer, for example of coverage, handles signals at points where the interpreter alone does not.
        with untraced():
            yield interrupt_after
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = usual
        gc.callbacks[:] = callbacks


Interruptions = Callable[[Callable[[], object]], Iterator[None]]
"""Type of the fixture `interruptions`, which repeatedly calls a function until a signal interrupts it."""
