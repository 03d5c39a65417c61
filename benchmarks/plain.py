"""A second process in which Headgate is plain Python, so that one run compares it with the compiled Headgate.

The caller creates objects there, calls their methods by name, and waits for every result, so only one process works at a
time.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any, TypeVar

from benchmarks.contenders import PLAIN, Build, Driver, Task, headgate
from benchmarks.harness import HEADGATE, NotOfferedError

T = TypeVar("T")

_made: dict[str, LocalObject] = {}
"""The objects of the second process, by name."""


def run_there(function: Callable[..., T], *args: Any) -> T:
    """Call a function in the second process and return its result."""
    return _process().submit(function, *args).result()


@cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _choose_plain)


def _choose_plain() -> None:
    os.environ["HEADGATE_PURE"] = "1"


class LocalObject:
    """An object whose methods are called by name, like those of a `RemoteObject`."""

    def call(self, method: str) -> Any:
        """Call a method without arguments and return its result."""
        return getattr(self, method)()


class RemoteObject(LocalObject):
    """An object in the second process; a new object with the same name replaces it."""

    def __init__(self, name: str, make: Callable[..., LocalObject], *args: Any) -> None:
        self.name = name
        run_there(_make, name, make, *args)

    def call(self, method: str) -> Any:
        """Call a method of the object in the second process and return its result."""
        return run_there(_call, self.name, method)


def _make(name: str, make: Callable[..., LocalObject], *args: Any) -> None:
    _made[name] = make(*args)


def _call(name: str, method: str) -> Any:
    return _made[name].call(method)


def compiled(task: Task, build: Build = headgate) -> Driver:
    """Build Headgate, if it is compiled in this process."""
    check_build(compiled=True)
    return build(task)


def plain(task: Task, build: Build = headgate) -> Driver:
    """Build Headgate, if it is plain Python in this process."""
    check_build(compiled=False)
    return build(task)


def check_build(*, compiled: bool) -> None:
    """Raise `NotOfferedError` if Headgate in this process is not the build to measure."""
    from headgate.stores import counters

    if str(counters.__file__).endswith(".py") is compiled:
        raise NotOfferedError(f"not {'compiled' if compiled else 'plain'}")


OURS: dict[str, Build] = {HEADGATE: compiled, PLAIN: plain}
