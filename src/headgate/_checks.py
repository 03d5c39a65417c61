"""Argument checks shared by all modules. Each raises `ConfigError`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn, TypeGuard, TypeVar

from headgate.errors import ConfigError

T = TypeVar("T")


class Unpicklable:
    """Base of objects that cannot leave their process: they have connections, locks or counts in memory."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        refuse_pickling(self)


def refuse_pickling(subject: object) -> NoReturn:
    """Raise the error of an object that can be neither pickled nor copied.

    Raises:
        TypeError: Always, with the alternative in its message.
    """
    raise TypeError(
        f"{type(subject).__name__} objects cannot be pickled or copied: create limiters and stores in each process. They "
        f"count together on a shared store with the same URL, like 'redis://localhost' or 'sqlite:///limits.db', and the "
        f"same limiter name. Settle a hold in the process that took it."
    )


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is an int or a float, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_count(name: str, value: object, least: int, most: int) -> None:
    """Refuse a value that is not a whole number from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"{name} must be a whole number from {least} to {most}, not {value!r}")


def check_text(what: str, value: object, shortest: int = 1) -> str:
    """Return the text as a plain `str`; compiled code does not accept subclasses, such as string enumerations."""
    if not isinstance(value, str) or len(value) < shortest:
        raise ConfigError(f"{what} is text, not {value!r}")
    return str.__str__(value)


def check_kind(what: str, value: T, kind: Any, expected: str) -> T:
    """Return the value if it is an instance of `kind`, and not a class."""
    if isinstance(value, type) or not isinstance(value, kind):
        is_url = isinstance(value, str) and "://" in value  # not shown: it may contain a password
        raise ConfigError(f"{what} is {expected}, not {'a URL' if is_url else repr(value)}")
    return value


def check_statuses(what: str, values: Any, expected: str) -> tuple[int, ...]:
    """Return an iterable of HTTP status codes as a tuple."""
    statuses: tuple[int, ...] = check_list(what, values, int, expected)
    for status in statuses:
        check_count(f"a status in {what}", status, 100, 599)
    return statuses


def check_list(what: str, values: Iterable[T], kind: Any, expected: str) -> tuple[T, ...]:
    """Return an iterable as a tuple if all items are instances of `kind`; text is not accepted as an iterable."""
    items = tuple(values) if isinstance(values, Iterable) and not isinstance(values, str | bytes) else None
    if items is None or not all(isinstance(item, kind) for item in items):
        raise ConfigError(f"{what} is a list like {expected}, not {values!r}")
    return items
