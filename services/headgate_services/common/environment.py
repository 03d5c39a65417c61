"""Settings as pydantic models. Each field is read from the environment variable of the same name in upper case.

A blank variable counts as unset.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from pydantic import BeforeValidator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from headgate_services.common.settings import explained_errors


def parsed_by(parse: Callable[[str], object]) -> BeforeValidator:
    """Return a validator that parses text; values of other types, such as defaults of tests, are unchanged."""
    return BeforeValidator(lambda value: parse(value) if isinstance(value, str) else value)


class ServiceSettings(BaseSettings):
    """Base class of the settings of a service.

    Attributes:
        with_blanks: Variables whose validators get blank text, too.
    """

    with_blanks: ClassVar[frozenset[str]] = frozenset()

    model_config = SettingsConfigDict(
        # Validation errors name the variable.
        alias_generator=str.upper,
        validate_by_name=True,
        validate_by_alias=True,
        extra="forbid",
        frozen=True,
        arbitrary_types_allowed=True,
        hide_input_in_errors=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _without_blanks(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {
            name: value
            for name, value in given.items()
            if not isinstance(value, str) or value.strip() or name.upper() in cls.with_blanks
        }


S = TypeVar("S", bound=ServiceSettings)


def load(settings: type[S]) -> S:
    """Read settings from the environment.

    Raises:
        SettingsError: A variable is invalid; the message has a line for each, which begins with its name.
    """
    with explained_errors():
        return settings()
