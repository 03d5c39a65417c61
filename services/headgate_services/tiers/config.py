"""What the service reads from its environment, once, at start-up.

Every field is the environment variable of the same name in capitals. An empty variable counts as unset.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy import URL

from headgate.errors import ConfigError
from headgate.http import Proxies
from headgate_services.common.databases import database_url
from headgate_services.tiers.limits import TierLimit, parse_rate_limits

DEFAULT_DATABASE = "sqlite:///headgate-tiers.db"


class SettingsError(ConfigError):
    """The service cannot start as it is configured; the message names the variable."""


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


def _rate_limits(text: str) -> str:
    if text:
        parse_rate_limits(text)
    return text


def _database(text: str) -> str:
    database_url(text or DEFAULT_DATABASE)
    return text


def _proxies(text: str) -> str:
    if networks := _listed(text):
        Proxies(networks)
    return text


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


class _Base(BaseSettings):
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


class AtomicSwitch(_Base):
    """The one setting that the middleware has a use for by itself."""

    saju_enable_atomic_rate_limiter: bool = False


class Settings(AtomicSwitch):
    """The settings of the tiers service."""

    saju_enable_rate_limiting: bool = False
    saju_redis_url: str = Field(default="", repr=False)
    saju_redis_timeout: float = Field(default=1.0, gt=0, le=60)
    saju_rate_limits: Annotated[str, AfterValidator(_rate_limits)] = ""
    saju_trusted_proxies: Annotated[str, AfterValidator(_proxies)] = ""
    saju_forwarded_header: Literal["x-forwarded-for", "forwarded"] = "x-forwarded-for"
    database_url: Annotated[str, AfterValidator(_database)] = Field(default="", repr=False)
    database_timeout: float = Field(default=5.0, ge=0.1, le=600)
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], BeforeValidator(_upper)
    ] = "INFO"

    @property
    def rate_limits(self) -> dict[str, TierLimit] | None:
        """The limits by tier; `None` for the usual ones."""
        return parse_rate_limits(self.saju_rate_limits) if self.saju_rate_limits else None

    @property
    def trusted_proxies(self) -> tuple[str, ...]:
        """Addresses and networks of the proxies in front of the service."""
        return _listed(self.saju_trusted_proxies)

    @property
    def database(self) -> URL:
        """Where keys are stored."""
        return database_url(self.database_url or DEFAULT_DATABASE)


def load_settings() -> Settings:
    """Return the settings of this process's environment.

    Raises:
        SettingsError: One of them is wrong; the message has a line for each, which begins with the variable's name.
    """
    loaded: Settings = _load(Settings)
    return loaded


def atomic_by_environment() -> bool:
    """Return whether the environment switches the script on.

    Raises:
        SettingsError: It says neither yes nor no.
    """
    switch: AtomicSwitch = _load(AtomicSwitch)
    return switch.saju_enable_atomic_rate_limiter


def _load(settings: type[Any]) -> Any:
    try:
        return settings()
    except ValidationError as error:
        problems = [(".".join(map(str, found["loc"])), found["msg"]) for found in error.errors()]
        raise SettingsError("\n".join(_explain(*problem) for problem in problems)) from None


def _explain(variable: str, message: str) -> str:
    """Return a line about one problem; values stay out of it, since some are secret."""
    return f"{variable}: {message.removeprefix('Value error, ')}"
