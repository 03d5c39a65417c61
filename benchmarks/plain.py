"""A second process, in which Headgate is plain Python, so that one run shows it beside the compiled one.

Objects are made and asked there by name. They take turns with those of this process: the caller waits for every answer.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any, TypeVar

from benchmarks.contenders import Build, Driver, Task, headgate
from benchmarks.harness import NotOfferedError

T = TypeVar("T")

_made: dict[str, Here] = {}
"""The objects of the second process."""


def run_there(function: Callable[..., T], *args: Any) -> T:
    """Return what a function returns in the second process."""
    return _process().submit(function, *args).result()


@cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _choose_plain)


def _choose_plain() -> None:
    os.environ["HEADGATE_PURE"] = "1"


class Here:
    """An object whose methods are called by name, so that it may be in either process."""

    def ask(self, method: str) -> Any:
        """Return what a method without arguments returns."""
        return getattr(self, method)()


class There(Here):
    """An object in the second process; what is made under the same name later takes its place."""

    def __init__(self, name: str, make: Callable[..., Here], *args: Any) -> None:
        self.name = name
        run_there(_make, name, make, *args)

    def ask(self, method: str) -> Any:
        """Return what a method of it returns."""
        return run_there(_ask, self.name, method)


def _make(name: str, make: Callable[..., Here], *args: Any) -> None:
    _made[name] = make(*args)


def _ask(name: str, method: str) -> Any:
    return _made[name].ask(method)


def compiled(task: Task, build: Build = headgate) -> Driver:
    """Build Headgate, if it is compiled in this process."""
    check_compiled()
    return build(task)


def plain(task: Task, build: Build = headgate) -> Driver:
    """Build Headgate, if it is plain Python in this process."""
    check_plain()
    return build(task)


def check_compiled() -> None:
    """Refuse plain Python."""
    if not is_compiled():
        raise NotOfferedError("not compiled")


def check_plain() -> None:
    """Refuse compiled modules."""
    if is_compiled():
        raise NotOfferedError("not plain: HEADGATE_PURE=1 chose the compiled modules")


def is_compiled() -> bool:
    """Return whether Headgate is compiled in this process."""
    from headgate.stores import counters

    return not str(counters.__file__).endswith(".py")
