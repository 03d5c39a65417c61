"""Locks that a fork leaves free in the child: threads of the parent that held them are not there to let go."""

from __future__ import annotations

import os
import weakref
from typing import Any, TypeVar

Lock = TypeVar("Lock")

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def fork_safe(lock: Lock) -> Lock:
    """Return a lock of `threading` as one that is free in every forked child."""
    _locks.add(lock)
    return lock


def _after_fork_in_child() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # as the standard library does with its own


os.register_at_fork(after_in_child=_after_fork_in_child)
