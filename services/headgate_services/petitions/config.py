"""Everything the service reads from its environment, once, at start-up.

A value that cannot work is refused with the variable's name: a limit that silently becomes another one is worse than a
service that does not start. An empty variable counts as unset.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NoReturn, cast

import psycopg
from psycopg.conninfo import conninfo_to_dict

from headgate import ConfigError
from headgate.http import Proxies
from headgate.urls import check_credentials
from headgate_services.common.settings import SettingsError, split_list
from headgate_services.petitions.domain.models import REALMS

Anonymous = Literal["address", "shared", "refuse"]

LONGEST_WINDOW_MINUTES = 1_440
LARGEST_LIMIT = 2**31 - 1
"""What the count's column, an INTEGER, can hold."""

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}(\.[0-9]{1,18})?")
_FLAGS = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}


class Environment:
    """Variables, each read as what it must be; whatever else it is raises `SettingsError`."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    def text(self, name: str, default: str) -> str:
        """Return a variable without the white space around it."""
        return self._variables.get(name, "").strip() or default

    def whole(self, name: str, default: int) -> int:
        """Return a whole number."""
        text = self.text(name, "")
        if text and not _WHOLE.fullmatch(text):
            _refuse(name, "must be a whole number")
        return int(text) if text else default

    def number(self, name: str, default: float) -> float:
        """Return a number such as 5 or 0.5."""
        text = self.text(name, "")
        if text and not _NUMBER.fullmatch(text):
            _refuse(name, "must be a number")
        return float(text) if text else default

    def flag(self, name: str, default: bool) -> bool:
        """Return a yes or no."""
        text = self.text(name, "").lower()
        if text and text not in _FLAGS:
            _refuse(name, "must be true or false")
        return _FLAGS[text] if text else default

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        """Return one of a few words."""
        text = self.text(name, default)
        if text not in choices:
            _refuse(name, f"must be one of {', '.join(choices)}")
        return text


def _refuse(name: str, why: str) -> NoReturn:
    raise SettingsError(f"{name}: {why}")


@dataclass(frozen=True, slots=True)
class PetitionQueueConfig:
    """How many petitions may wait.

    Attributes:
        threshold: So many waiting petitions, and no more are taken.
        hysteresis: They are taken again once fewer than threshold - hysteresis wait.
        cache_ttl_seconds: How long the number of waiting petitions is believed before it is counted again.
        retry_after_seconds: `Retry-After` of a refusal.
    """

    threshold: int = 10_000
    hysteresis: int = 500
    cache_ttl_seconds: float = 5.0
    retry_after_seconds: int = 60

    def __post_init__(self) -> None:
        _demand(self.threshold >= 1, "PETITION_QUEUE_THRESHOLD: must be at least 1")
        _demand(
            0 <= self.hysteresis < self.threshold,
            f"PETITION_QUEUE_HYSTERESIS: must be at least 0 and below PETITION_QUEUE_THRESHOLD, {self.threshold}",
        )
        _demand(0 < self.cache_ttl_seconds <= 3600, "PETITION_QUEUE_CACHE_TTL: must be above 0, at most 3600")
        _demand(self.retry_after_seconds >= 1, "PETITION_RETRY_AFTER: must be at least 1")


@dataclass(frozen=True, slots=True)
class PetitionRateLimitConfig:
    """How many petitions may be submitted.

    Attributes:
        limit_per_hour: Most petitions of one submitter in a window.
        window_minutes: How long the window is; an hour unless it is changed.
        bucket_ttl_hours: How long counters are kept. Longer than the window, or live ones would be deleted.
        strict: Count each petition until the end of its minute plus the window, so that no span as long as the window
            ever holds more than the limit. Otherwise it counts from the beginning of its minute, as the document has
            it, and may be forgotten up to a minute early.
        realm_limit: Most petitions to one realm in a window, of all submitters; 0 for no such limit.
        global_limit: Most petitions in a window altogether; 0 for no such limit.
        co_sign_limit_per_hour: Most co-signs of one identity in a window.
    """

    limit_per_hour: int = 10
    window_minutes: int = 60
    bucket_ttl_hours: int = 2
    strict: bool = False
    realm_limit: int = 0
    global_limit: int = 0
    co_sign_limit_per_hour: int = 50

    def __post_init__(self) -> None:
        bounds = {
            "PETITION_RATE_LIMIT_PER_HOUR": (self.limit_per_hour, 1, LARGEST_LIMIT),
            "PETITION_RATE_LIMIT_WINDOW_MINUTES": (self.window_minutes, 1, LONGEST_WINDOW_MINUTES),
            "PETITION_RATE_LIMIT_PER_REALM": (self.realm_limit, 0, LARGEST_LIMIT),
            "PETITION_RATE_LIMIT_GLOBAL": (self.global_limit, 0, LARGEST_LIMIT),
            "PETITION_CO_SIGN_LIMIT_PER_HOUR": (self.co_sign_limit_per_hour, 1, LARGEST_LIMIT),
        }
        for name, (value, least, most) in bounds.items():
            _demand(least <= value <= most, f"{name}: must be from {least} to {most}")
        _demand(
            self.bucket_ttl_hours * 60 > self.window_minutes,
            f"PETITION_RATE_LIMIT_TTL_HOURS: must be longer than the window of {self.window_minutes} minutes",
        )


def load_petition_config(
    variables: Mapping[str, str] | None = None,
) -> tuple[PetitionQueueConfig, PetitionRateLimitConfig]:
    """Return both from these variables, by default the environment's.

    Raises:
        SettingsError: One of them cannot work; the message begins with its name.
    """
    given = Environment(os.environ if variables is None else variables)
    threshold = given.whole("PETITION_QUEUE_THRESHOLD", 10_000)
    queue = PetitionQueueConfig(
        threshold=threshold,
        # A small threshold alone gets the same proportion instead of a start that fails.
        hysteresis=given.whole("PETITION_QUEUE_HYSTERESIS", min(500, max(0, threshold) // 20)),
        cache_ttl_seconds=given.number("PETITION_QUEUE_CACHE_TTL", 5.0),
        retry_after_seconds=given.whole(
            "PETITION_RETRY_AFTER", given.whole("PETITION_QUEUE_RETRY_AFTER", 60)
        ),
    )
    limit = PetitionRateLimitConfig(
        limit_per_hour=given.whole("PETITION_RATE_LIMIT_PER_HOUR", 10),
        window_minutes=given.whole("PETITION_RATE_LIMIT_WINDOW_MINUTES", 60),
        bucket_ttl_hours=given.whole("PETITION_RATE_LIMIT_TTL_HOURS", 2),
        strict=given.flag("PETITION_RATE_LIMIT_STRICT", False),
        realm_limit=given.whole("PETITION_RATE_LIMIT_PER_REALM", 0),
        global_limit=given.whole("PETITION_RATE_LIMIT_GLOBAL", 0),
        co_sign_limit_per_hour=given.whole("PETITION_CO_SIGN_LIMIT_PER_HOUR", 50),
    )
    return queue, limit


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise SettingsError(otherwise)


@dataclass(frozen=True, slots=True, kw_only=True)
class PetitionsSettings:
    """The settings of the petition service.

    Attributes:
        queue: How many petitions may wait.
        rate_limit: How many may be submitted.
        database_url: Where PostgreSQL is; empty for an embedded one.
        data_dir: Where the embedded one keeps its files.
        pool_size: Most connections to the database.
        database_timeout: Seconds that the database has, from asking for a connection to the end of the last statement.
        outage_seconds: `Retry-After` while the database cannot be reached, in seconds.
        anonymous: By what petitions without a submitter are counted: by the client's address, all together, or not at
            all because they are refused.
        proxies: Proxies that are trusted to name the client's address.
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


def load_settings(variables: Mapping[str, str] | None = None) -> PetitionsSettings:
    """Return the settings from these variables, by default the environment's.

    Raises:
        SettingsError: One of them cannot work; the message begins with its name.
    """
    variables = os.environ if variables is None else variables
    given = Environment(variables)
    queue, rate_limit = load_petition_config(variables)
    data_dir = given.text("PETITION_DATA_DIR", "")
    return PetitionsSettings(
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
    networks = split_list(text)
    try:
        return Proxies(networks) if networks else None
    except ConfigError as error:
        raise SettingsError(f"TRUSTED_PROXIES: {error}") from error


def _default_data_dir(variables: Mapping[str, str]) -> Path:
    """Return where a user's programs keep their data; for root, where those of the system do.

    PostgreSQL does not run as root, and other users cannot reach root's own folder.
    """
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        return Path("/var/lib/headgate/petitions")
    home = variables.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(home) / "headgate" / "petitions"
