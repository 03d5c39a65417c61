"""Settings as pydantic models: every field is the environment variable of the same name in capitals.

An empty variable counts as unset: Compose files often pass one.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BeforeValidator, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from headgate_services.common.settings import SettingsError


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


LogLevel = Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], BeforeValidator(_upper)]


class ServiceSettings(BaseSettings):
    """The base of a service's settings."""

    model_config = SettingsConfigDict(
        # The variable's own name stands in every validation error.
        alias_generator=str.upper,
        validate_by_name=True,
        validate_by_alias=True,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )


S = TypeVar("S", bound=ServiceSettings)


def load(settings: type[S]) -> S:
    """Return the settings of this process's environment.

    Raises:
        SettingsError: One of them is wrong; the message has a line for each, which begins with the variable's name.
    """
    try:
        return settings()
    except ValidationError as error:
        problems = [(".".join(map(str, found["loc"])), found["msg"]) for found in error.errors()]
        raise SettingsError("\n".join(_explain(*problem) for problem in problems)) from None


def _explain(variable: str, message: str) -> str:
    """Return a line about one problem; values stay out of it, since some are secret."""
    message = message.removeprefix("Value error, ")
    return f"{variable}: {message}" if variable else message
