"""Settings of the tiers service."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from sqlalchemy import URL

from headgate.http import Proxies
from headgate_services.common.databases import database_url
from headgate_services.common.environment import ServiceSettings, load
from headgate_services.common.settings import LogLevel, split_list
from headgate_services.tiers.limits import TierLimit, parse_rate_limits

DEFAULT_DATABASE = "sqlite:///headgate-tiers.db"


def _rate_limits(text: str) -> str:
    if text:
        parse_rate_limits(text)
    return text


def _database(text: str) -> str:
    database_url(text or DEFAULT_DATABASE)
    return text


def _proxies(text: str) -> str:
    if networks := split_list(text):
        Proxies(networks)
    return text


class AtomicSwitch(ServiceSettings):
    """The setting that the middleware reads by itself."""

    saju_enable_atomic_rate_limiter: bool = False


class TiersSettings(AtomicSwitch):
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
    log_level: LogLevel = "INFO"

    @property
    def rate_limits(self) -> dict[str, TierLimit] | None:
        """The limits by tier; `None` for the defaults."""
        return parse_rate_limits(self.saju_rate_limits) if self.saju_rate_limits else None

    @property
    def trusted_proxies(self) -> tuple[str, ...]:
        """Addresses and networks of the proxies in front of the service."""
        return split_list(self.saju_trusted_proxies)

    @property
    def database(self) -> URL:
        """The URL of the database of the keys."""
        return database_url(self.database_url or DEFAULT_DATABASE)


load_settings = partial(load, TiersSettings)


def atomic_by_environment() -> bool:
    """Return whether `SAJU_ENABLE_ATOMIC_RATE_LIMITER` is set.

    Raises:
        SettingsError: The value is not a boolean.
    """
    return load(AtomicSwitch).saju_enable_atomic_rate_limiter
