"""Settings as pydantic models: every field is the environment variable of the same name in capitals."""

from __future__ import annotations

from typing import TypeVar

from pydantic_settings import BaseSettings, SettingsConfigDict

from headgate_services.common.settings import explained_errors


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
    with explained_errors():
        return settings()
