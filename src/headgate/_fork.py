"""What must happen around a fork, registered with the interpreter once for all of Headgate.

A fork copies the whole process but only the thread that forks. Locks that other threads hold stay locked in the child for
ever, and connections are then shared with the parent. An object that has either calls `watch(self)` at the end of its
constructor, and has any of these methods:

`before_fork()`
    In the thread that forks, before it does. Take the locks here that guard what must not be copied half written.
`after_fork_in_parent()`
    In that thread, afterwards, for every object that was watched before the fork. Release what `before_fork` took; that may
    be nothing, since a signal handler may have raised in it.
`after_fork_in_child()`
    In the only thread of the child, for every object, whether or not `before_fork` was called: another thread may have made
    it in the last moment. Make all locks free and forget what is the parent's.

A lock of `threading` can be watched itself: `self._lock = watch(threading.Lock())` is free in every child.

What the methods may rely on:

- Objects are watched weakly; one that is gone is not called.
- `before_fork` is called in the order in which objects were watched, the other two in the reverse order. So two threads that
  fork at once take the locks in the same order.
- An exception in one method does not keep the others from being called. The interpreter reports it as one that it ignores
  (`sys.unraisablehook`), and the fork goes on.
- A method that raises is called a second time, because a signal handler may have raised ahead of its first line. So all
  three must be safe to repeat.
- `watch` takes no lock. Any thread may call it, also in a signal handler or a `__del__`, and a fork may come in the middle.
- If a signal handler forks while these methods run, its own fork calls only `after_fork_in_child`. The thread has the locks
  already, and releases them after the fork that was interrupted.

Where there is no `os.register_at_fork`, as on Windows, there are no forks, and nothing is ever called.
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


class _Fork:
    """A fork under way.

    Attributes:
        prepared: The objects whose `before_fork` was called, by their ids.
        is_over: Whether all hooks after it were called.
    """

    def __init__(self) -> None:
        self.prepared: dict[int, object] = {}
        self.is_over = False


class _Forks(threading.local):
    """The forks that this thread is in the middle of, outermost first: several if a signal handler forks while hooks run."""

    def __init__(self) -> None:
        self.under_way: list[_Fork] = []


_forks = _Forks()


def watch(item: T) -> T:
    """Have an object's methods called around every fork for as long as it lives, and return it."""
    _watched[next(_numbers)] = item
    return item


def _alive() -> list[object]:
    """Return all watched objects, in the order in which they were watched."""
    return [item for reference in _watched.valuerefs() if (item := reference()) is not None]


def _missing(prepared: dict[int, object]) -> list[object]:
    """Return those that are not prepared yet."""
    return [item for item in _alive() if id(item) not in prepared]


def _before() -> None:
    under_way = _forks.under_way
    while under_way and under_way[-1].is_over:
        del under_way[-1]
    fork = _Fork()
    under_way.append(fork)
    if len(under_way) == 1:
        _prepare(fork.prepared)


def _prepare(prepared: dict[int, object]) -> None:
    errors: list[BaseException] = []
    while True:  # others may be added while a hook waits for its lock
        try:
            missing = _missing(prepared)
            for item in missing:
                prepared[id(item)] = item
                _call_safely(item, "before_fork", errors)
            if not missing:
                break
        except BaseException as error:  # noqa: BLE001  # a signal handler raised between two hooks
            errors.append(error)
    _report(errors)


# The hooks after a fork are registered twice, because a signal that came during the fork is handled, and may raise, in the
# first Python code after it. The first call does all the work, and the second what the first may have left undone.


def _after_in_parent() -> None:
    under_way = _forks.under_way
    if not under_way:
        return
    fork = under_way[-1]
    if fork.is_over:
        del under_way[-1]
        return
    errors: list[BaseException] = []
    while fork.prepared:
        item = fork.prepared[next(reversed(fork.prepared))]
        _call_safely(item, "after_fork_in_parent", errors)
        fork.prepared.pop(id(item), None)  # in the child of a handler that forked meanwhile, all are gone
    fork.is_over = True
    _report(errors)


def _after_in_child() -> None:
    under_way = _forks.under_way
    if under_way and under_way[-1].is_over:
        del under_way[-1]
        return
    errors: list[BaseException] = []
    for item in reversed(_alive()):
        _call_safely(item, "after_fork_in_child", errors)
        # Of a lock, which the standard library uses for its own.
        _call_safely(item, "_at_fork_reinit", errors)
    for fork in under_way:  # one around this fork goes on in the child, and has nothing to release any more
        fork.prepared.clear()
    if under_way:
        under_way[-1].is_over = True
    _report(errors)


def _call(item: object, name: str, errors: list[BaseException]) -> bool:
    """Call a method if the object has it. Return whether it raised, and collect the exception."""
    try:
        hook = getattr(item, name, None)
        if hook is not None:
            hook()
    except BaseException as error:  # noqa: BLE001  # the other objects must be called all the same
        errors.append(error)
        return True
    return False


def _call_safely(item: object, name: str, errors: list[BaseException]) -> None:
    """As `_call`, and once more if it raises."""
    if _call(item, name, errors):
        _call(item, name, [])


def _report(errors: list[BaseException]) -> None:
    """Raise what was collected; the interpreter reports it and goes on."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise BaseExceptionGroup("several hooks around a fork failed", errors)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before)
    for _ in range(2):
        os.register_at_fork(after_in_parent=_after_in_parent, after_in_child=_after_in_child)
