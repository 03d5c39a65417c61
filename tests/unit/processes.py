"""Forks and signals, for tests of what they do to a limiter."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator

SECONDS_TO_LIVE = 10


def fork(work: Callable[[], bool]) -> int:
    """Do the work in a child, which is killed if it hangs, and return its process id."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # Python 3.12 warns of forks beside threads: that is the test
        child = os.fork()
    if child == 0:
        signal.alarm(SECONDS_TO_LIVE)
        came_out_right = False
        try:
            came_out_right = work()
        finally:
            os._exit(0 if came_out_right else 1)
    return child


def came_out_right(*children: int) -> bool:
    """Wait for all children and return whether the work of each came out right."""
    statuses = [os.waitpid(child, 0)[1] for child in children]
    return all(os.waitstatus_to_exitcode(status) == 0 for status in statuses)


def in_child(work: Callable[[], bool]) -> bool:
    """Return whether the work came out right in a child."""
    return came_out_right(fork(work))


class Interrupted(Exception):
    """What a signal handler raised, in the middle of whatever was going on."""


Interruptions = Callable[[Callable[[], object]], Iterator[None]]
"""The fixture `interruptions`: calls a function until a signal interrupts it, again and again."""
