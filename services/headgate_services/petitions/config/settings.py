"""Everything the service reads from its environment, once, at start-up."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import psycopg
from psycopg.conninfo import conninfo_to_dict

from headgate import ConfigError
from headgate.http import Proxies
from headgate.urls import check_credentials
from headgate_services.petitions.config.environment import Environment, SettingsError
from headgate_services.petitions.config.petition_config import (
    PetitionQueueConfig,
    PetitionRateLimitConfig,
    load_petition_config,
)
from headgate_services.petitions.domain.models.petition import REALMS

Anonymous = Literal["address", "shared", "refuse"]

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of the petition service.

    Attributes:
        queue: How many petitions may wait.
        rate_limit: How many may be submitted.
        database_url: Where PostgreSQL is; empty for an embedded one.
        data_dir: Where the embedded one keeps its files.
        pool_size: Most connections to the database.
        database_timeout: Seconds that the database has, from asking for a connection to the end of the last statement.
        outage_seconds: What clients are told to wait while the database cannot be reached.
        anonymous: By what petitions without a submitter are counted: by the client's address, all together, or not at
            all because they are refused.
        proxies: Whose word about the client's address is taken.
        default_realm: Where petitions go that name no realm.
        cleanup_interval_seconds: How often expired counters are removed.
        status_wait_seconds: How long a question for a new status waits for one.
        metrics_max_submitters: How many submitters have metric series of their own.
    """

    queue: PetitionQueueConfig = field(default_factory=PetitionQueueConfig)
    rate_limit: PetitionRateLimitConfig = field(default_factory=PetitionRateLimitConfig)
    database_url: str = field(default="", repr=False)
    data_dir: Path = field(default_factory=lambda: _default_data_dir(os.environ))
    pool_size: int = 10
    database_timeout: float = 5.0
    outage_seconds: float = 30.0
    anonymous: Anonymous = "address"
    proxies: Proxies | None = None
    default_realm: str = REALMS[0]
    cleanup_interval_seconds: float = 1_800.0
    status_wait_seconds: float = 30.0
    metrics_max_submitters: int = 1_000
    service_name: str = "archon72-api"
    environment: str = "development"
    host: str = "127.0.0.1"
    port: int = 8000
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        if self.default_realm not in REALMS:
            raise SettingsError(f"PETITION_DEFAULT_REALM: must be one of {', '.join(REALMS)}")
        least: dict[str, tuple[float, float]] = {
            "PETITION_DATABASE_POOL_SIZE": (self.pool_size, 1),
            "PETITION_DATABASE_TIMEOUT": (self.database_timeout, 0.1),
            "PETITION_DATABASE_OUTAGE_SECONDS": (self.outage_seconds, 0),
            "PETITION_CLEANUP_INTERVAL_SECONDS": (self.cleanup_interval_seconds, 0.1),
            "PETITION_STATUS_WAIT_SECONDS": (self.status_wait_seconds, 0),
            "PETITION_METRICS_MAX_SUBMITTERS": (self.metrics_max_submitters, 0),
            "PORT": (self.port, 0),
        }
        for name, (value, bound) in least.items():
            if value < bound:
                raise SettingsError(f"{name}: must be at least {bound}")
        if self.port > 65_535:
            raise SettingsError("PORT: must be at most 65535")


def load_settings(variables: Mapping[str, str] | None = None) -> Settings:
    """Return the settings from these variables, by default the environment's.

    Raises:
        SettingsError: One of them cannot work; the message begins with its name.
    """
    variables = os.environ if variables is None else variables
    given = Environment(variables)
    queue, rate_limit = load_petition_config(variables)
    data_dir = given.text("PETITION_DATA_DIR", "")
    return Settings(
        queue=queue,
        rate_limit=rate_limit,
        database_url=_database_url(given.text("DATABASE_URL", "")),
        data_dir=Path(data_dir).absolute() if data_dir else _default_data_dir(variables),
        pool_size=given.whole("PETITION_DATABASE_POOL_SIZE", 10),
        database_timeout=given.number("PETITION_DATABASE_TIMEOUT", 5.0),
        outage_seconds=given.number("PETITION_DATABASE_OUTAGE_SECONDS", 30.0),
        anonymous=cast(
            Anonymous, given.choice("PETITION_ANONYMOUS", "address", ("address", "shared", "refuse"))
        ),
        proxies=_proxies(given.text("TRUSTED_PROXIES", "")),
        default_realm=given.text("PETITION_DEFAULT_REALM", REALMS[0]),
        cleanup_interval_seconds=given.number("PETITION_CLEANUP_INTERVAL_SECONDS", 1_800.0),
        status_wait_seconds=given.number("PETITION_STATUS_WAIT_SECONDS", 30.0),
        metrics_max_submitters=given.whole("PETITION_METRICS_MAX_SUBMITTERS", 1_000),
        service_name=given.text("SERVICE_NAME", "archon72-api"),
        environment=given.text("ENVIRONMENT", "development"),
        host=given.text("HOST", "127.0.0.1"),
        port=given.whole("PORT", 8000),
        log_level=Environment({"LOG_LEVEL": given.text("LOG_LEVEL", "INFO").upper()}).choice(
            "LOG_LEVEL", "INFO", _LEVELS
        ),
    )


def _database_url(text: str) -> str:
    """Return where PostgreSQL is, as a URL or as `host=… dbname=…`, if it can be read; no message repeats it."""
    try:
        check_credentials(text)
        scheme, is_url, _ = text.partition("://")
        if is_url and scheme.lower() not in ("postgresql", "postgres"):
            raise SettingsError("must begin with postgresql://")
        conninfo_to_dict(text)
    except ConfigError as error:
        raise SettingsError(f"DATABASE_URL: {error}") from None
    except psycopg.Error:
        raise SettingsError("DATABASE_URL: is not a URL like postgresql://user@host/name") from None
    return text


def _proxies(text: str) -> Proxies | None:
    networks = tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        return Proxies(networks) if networks else None
    except ConfigError as error:
        raise SettingsError(f"TRUSTED_PROXIES: {error}") from error


def _default_data_dir(variables: Mapping[str, str]) -> Path:
    """Return where a user's programs keep their data; for root, where those of the system do.

    PostgreSQL does not run as root, and nobody else can reach into root's own folder.
    """
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        return Path("/var/lib/headgate/petitions")
    home = variables.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(home) / "headgate" / "petitions"
