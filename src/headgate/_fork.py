"""Fork hooks, registered with the interpreter once for all of Headgate.

A fork copies the whole process but only the thread that forks. Locks held by other threads stay locked in the child
forever, and connections are shared with the parent. An object with locks or connections calls `watch(self)` at the end
of its constructor, and has any of these methods:

`before_fork()`
    Called in the forking thread before the fork. Acquire the locks here that guard data that changes in several steps.
`after_fork_in_parent()`
    Called in that thread after the fork, for every object whose `before_fork` was called. Release the locks of
    `before_fork`; it may not have acquired them if a signal handler raised.
`after_fork_in_child()`
    Called in the only thread of the child, for every object, even if `before_fork` was not called: another thread may have
    created the object just before the fork. Replace locks and drop resources of the parent.

A lock of `threading` can be watched itself: `self._lock = watch(threading.Lock())` is free in every child.

Guarantees:

- Objects are referenced weakly.
- `before_fork` is called in the order in which objects were watched, the other two in the reverse order. So two threads that
  fork at once take the locks in the same order.
- If a signal handler raises once in one of the methods, the fork continues, and every lock is released: the hooks after a
  fork are called again. So the methods must be idempotent. They must not raise themselves.
- `watch` takes no lock. Any thread may call it, also in a signal handler or a `__del__`, and a fork may interrupt it.

On platforms without `os.register_at_fork`, like Windows, nothing is called.
"""

from __future__ import annotations

import os
import threading
from itertools import count
from typing import TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

# Each change of the dictionary inside is one step of the interpreter, so it needs no lock. It keeps the order of insertion.
_watched: WeakValueDictionary[int, object] = WeakValueDictionary()
_numbers = count()


class _Fork(threading.local):
    """The fork in progress in this thread.

    Attributes:
        prepared: The objects whose `before_fork` was called.
        is_open: Whether the hooks after the fork are still to be called.
    """

    def __init__(self) -> None:
        self.prepared: list[object] = []
        self.is_open = False


_fork = _Fork()


def watch(item: T) -> T:
    """Register the fork methods of an object, for as long as it lives, and return it."""
    _watched[next(_numbers)] = item
    return item


def _alive() -> list[object]:
    """Return all watched objects, in the order in which they were watched."""
    return [item for reference in _watched.valuerefs() if (item := reference()) is not None]


def _before() -> None:
    _fork.is_open = True
    for item in _alive():
        _fork.prepared.append(item)
        _call(item, "before_fork")


# The hooks after a fork are registered twice. A signal that arrives during the fork is handled in the first Python code
# after it, and its handler may raise there; the interpreter reports that. The second call completes the work.


def _after_in_parent() -> None:
    prepared = _fork.prepared
    while prepared:
        _call(prepared[-1], "after_fork_in_parent")
        prepared.pop()


def _after_in_child() -> None:
    if not _fork.is_open:
        return
    for item in reversed(_alive()):
        _call(item, "after_fork_in_child")
        # Locks have this method; the standard library uses it for its locks.
        _call(item, "_at_fork_reinit")
    _fork.prepared.clear()
    _fork.is_open = False


def _call(item: object, name: str) -> None:
    """Call a method if the object has it."""
    hook = getattr(item, name, None)
    if hook is not None:
        hook()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before)
    for _ in range(2):
        os.register_at_fork(after_in_parent=_after_in_parent, after_in_child=_after_in_child)
