"""Checks that many arguments need, so that the same mistake is the same error everywhere. Each raises ConfigError."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn, TypeGuard, TypeVar

from headgate.errors import ConfigError

T = TypeVar("T")


class Unpicklable:
    """An object that belongs to one process: it has connections, locks or counts in memory."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        refuse_pickling(self)


def refuse_pickling(subject: object) -> NoReturn:
    """Raise the error of an object that can be neither pickled nor copied.

    Raises:
        TypeError: Always; it explains what to do instead.
    """
    raise TypeError(
        f"{type(subject).__name__} objects cannot be pickled or copied: create limiters and stores in each process. They "
        f"count together on a shared store with the same URL, like 'redis://localhost' or 'sqlite:///limits.db', and the "
        f"same limiter name. Settle a hold in the process that took it."
    )


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number; a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_count(name: str, value: object, least: int, most: int) -> None:
    """Refuse what is not a whole number from the least to the most that it can be."""
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"{name} must be a whole number from {least} to {most}, not {value!r}")


def check_text(what: str, value: object, shortest: int = 1) -> str:
    """Return the text that was given; of a subclass, as an enumeration's, the plain text, which compiled code takes."""
    if not isinstance(value, str) or len(value) < shortest:
        raise ConfigError(f"{what} is text, not {value!r}")
    return str.__str__(value)


def check_kind(what: str, value: T, kind: Any, expected: str) -> T:
    """Return the object that was given if it is of this kind; a class is none."""
    if isinstance(value, type) or not isinstance(value, kind):
        given = (
            "a URL" if isinstance(value, str) and "://" in value else repr(value)
        )  # it may have a password
        raise ConfigError(f"{what} is {expected}, not {given}")
    return value


def check_statuses(what: str, values: Any, expected: str) -> tuple[int, ...]:
    """Return the statuses of HTTP responses that were given, in a list or anything like it."""
    statuses: tuple[int, ...] = check_list(what, values, int, expected)
    for status in statuses:
        check_count(f"a status in {what}", status, 100, 599)
    return statuses


def check_list(what: str, values: Iterable[T], kind: Any, expected: str) -> tuple[T, ...]:
    """Return the objects that were given, in a list or anything like it, if all are of this kind; a text is no list."""
    items = tuple(values) if isinstance(values, Iterable) and not isinstance(values, str | bytes) else None
    if items is None or not all(isinstance(item, kind) for item in items):
        raise ConfigError(f"{what} is a list like {expected}, not {values!r}")
    return items
