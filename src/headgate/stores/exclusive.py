"""A lock that costs next to nothing while nobody else wants it.

`with threading.Lock()` takes a fifth of a decision in memory: two methods are looked up, bound and called. Deleting the one
entry of a dictionary is a single bytecode, succeeds for exactly one thread however many try, and says so to the others by an
exception; putting it back is another. So

    try:
        del free[0]
    except KeyError:
        wait_for(free)
    try:
        ...
    finally:
        free[0] = None

is a lock. Between taking it and the `try`, and between the end of the block and giving it back, nothing is called; and only
when something is called does the interpreter run signal handlers. So one that raises cannot leave the lock taken. (That is
why this is no context manager: written in Python, its `__exit__` would be such a call.)

What is guarded must be short and must never wait for anything. Nor may the thread that is inside come a second time: it
would wait for itself for ever. So no limiter may be called from where Python interrupts a thread at any place: a signal
handler, a `__del__`, a callback of a weak reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from time import sleep
from typing import Concatenate, ParamSpec, Protocol, TypeVar

Free = dict[int, None]
"""Has its one entry while nobody is inside."""

_PAUSE = (
    0.000_05  # seconds; whoever is inside was interrupted there, and goes on as soon as somebody lets it run
)


class _Guarded(Protocol):
    @property
    def _free(self) -> Free: ...


P = ParamSpec("P")
R = TypeVar("R")
Owner = TypeVar("Owner", bound=_Guarded)


def wait_for(free: Free) -> None:
    """Take it as soon as it is free."""
    while True:
        try:
            del free[0]
        except KeyError:
            sleep(_PAUSE)
        else:
            return


def exclusive(
    method: Callable[Concatenate[Owner, P], R],
) -> Callable[Concatenate[Owner, P], R]:
    """Return the method as one that nobody else is in who shares `_free`."""

    @wraps(method)
    def alone(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> R:
        free = self._free
        try:
            del free[0]
        except KeyError:
            wait_for(free)
        try:
            return method(self, *args, **kwargs)
        finally:
            free[0] = None

    return alone
