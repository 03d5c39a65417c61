"""Settings of the tiers service."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import NoDecode
from sqlalchemy import URL

from headgate.http import Proxies
from headgate_services.common.databases import database_url
from headgate_services.common.environment import ServiceSettings, load, parsed_by
from headgate_services.common.settings import LogLevel, split_list
from headgate_services.tiers.limits import TierLimit, parse_rate_limits

DEFAULT_DATABASE = database_url("sqlite:///headgate-tiers.db")
DatabaseUrl = Annotated[URL, NoDecode, parsed_by(database_url)]


def _proxies(text: str) -> tuple[str, ...]:
    networks = split_list(text)
    if networks:
        Proxies(networks)
    return networks


class AtomicSwitch(ServiceSettings):
    """The setting that the middleware reads by itself."""

    saju_enable_atomic_rate_limiter: bool = False


class TiersSettings(AtomicSwitch):
    """The settings of the tiers service."""

    saju_enable_rate_limiting: bool = False
    saju_redis_url: str = Field(default="", repr=False)
    saju_redis_timeout: float = Field(default=1.0, gt=0, le=60)
    saju_rate_limits: Annotated[dict[str, TierLimit] | None, NoDecode, parsed_by(parse_rate_limits)] = None
    saju_trusted_proxies: Annotated[tuple[str, ...], NoDecode, parsed_by(_proxies)] = ()
    saju_forwarded_header: Literal["x-forwarded-for", "forwarded"] = "x-forwarded-for"
    database_url: DatabaseUrl = Field(default=DEFAULT_DATABASE, repr=False)
    database_timeout: float = Field(default=5.0, ge=0.1, le=600)
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    log_level: LogLevel = "INFO"

    @property
    def separate_counts(self) -> str:
        """The counts that each process keeps separately, and the setting that moves them, or an empty text."""
        is_in_memory = self.saju_enable_rate_limiting and not self.saju_redis_url
        return "the buckets are in memory; set SAJU_REDIS_URL to a shared Redis" if is_in_memory else ""


load_settings = partial(load, TiersSettings)


def atomic_by_environment() -> bool:
    """Return whether `SAJU_ENABLE_ATOMIC_RATE_LIMITER` is set.

    Raises:
        SettingsError: The value is not a boolean.
    """
    return load(AtomicSwitch).saju_enable_atomic_rate_limiter
