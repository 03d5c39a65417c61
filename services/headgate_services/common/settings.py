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
    """The service cannot run as it is configured; each line of the message begins with the variable's name."""


def _whole_number(value: object) -> object:
    """Refuse text that pydantic would accept as a whole number, such as 5.0 or 1_000."""
    if isinstance(value, bool) or (isinstance(value, str) and not _WHOLE_NUMBER.fullmatch(value)):
        raise ValueError("must be a whole number")
    return value


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


WholeNumber = Annotated[int, BeforeValidator(_whole_number)]
LogLevel = Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], BeforeValidator(_upper)]


def read(config: type[T], variables: Mapping[str, str]) -> T:
    """Return a pydantic dataclass whose fields have the names of environment variables as aliases.

    Raises:
        SettingsError: A variable is wrong; the message has a line for each.
    """
    given = {name: text.strip() for name, text in variables.items() if name.isupper() and text.strip()}
    with explained_errors():
        return TypeAdapter(config).validate_python(given)


@contextmanager
def explained_errors() -> Iterator[None]:
    """Turn an error of pydantic into a `SettingsError` with a line per variable; values stay out, since some are secret."""
    try:
        yield
    except ValidationError as error:
        lines = []
        for found in error.errors():
            variable, message = ".".join(map(str, found["loc"])), found["msg"].removeprefix("Value error, ")
            lines.append(f"{variable}: {message}" if variable else message)
        raise SettingsError("\n".join(lines)) from None


def split_list(text: str) -> tuple[str, ...]:
    """Return the entries of a list with commas, without white space around them; empty ones are skipped."""
    return tuple(entry.strip() for entry in text.split(",") if entry.strip())
