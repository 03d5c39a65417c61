"""Settings from environment variables, checked by pydantic; an empty variable counts as unset."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Literal, TypeVar

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from headgate import ConfigError

_WHOLE_NUMBER = re.compile(r"\s*[+-]?[0-9]{1,18}\s*")

T = TypeVar("T")


class SettingsError(ConfigError):
    """A setting is invalid. Each line of the message begins with the name of a variable."""


def _whole_number(value: object) -> object:
    """Reject text such as 5.0 or 1_000, which pydantic accepts as a whole number."""
    if isinstance(value, bool) or (isinstance(value, str) and not _WHOLE_NUMBER.fullmatch(value)):
        raise ValueError("must be a whole number")
    return value


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


WholeNumber = Annotated[int, BeforeValidator(_whole_number)]
LogLevel = Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], BeforeValidator(_upper)]


def read(config: type[T], variables: Mapping[str, str]) -> T:
    """Read a pydantic dataclass whose fields have the names of environment variables as aliases.

    Raises:
        SettingsError: A variable is invalid; the message has a line for each.
    """
    given = {name: text.strip() for name, text in variables.items() if name.isupper() and text.strip()}
    with explained_errors():
        return TypeAdapter(config).validate_python(given)


@contextmanager
def explained_errors() -> Iterator[None]:
    """Turn pydantic's errors into a `SettingsError` with a line per variable, without values: some are secret."""
    try:
        yield
    except ValidationError as error:
        lines = []
        for found in error.errors():
            variable, message = ".".join(map(str, found["loc"])), found["msg"].removeprefix("Value error, ")
            lines.append(f"{variable}: {message}" if variable else message)
        raise SettingsError("\n".join(lines)) from None


def split_list(text: str) -> tuple[str, ...]:
    """Return the entries of a comma-separated list, stripped; empty entries are skipped."""
    return tuple(entry.strip() for entry in text.split(",") if entry.strip())
