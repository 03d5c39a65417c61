"""Everything the service reads from its environment, once, at start-up.

A value that cannot work is refused with the variable's name: a limit that silently becomes another one is worse than a
service that does not start. An empty variable counts as unset.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

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
_NUMBERS = {
    int: (re.compile(r"[+-]?[0-9]{1,18}"), "must be a whole number"),
    float: (re.compile(r"[+-]?[0-9]{1,18}(\.[0-9]{1,18})?"), "must be a number"),
}
_FLAGS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Variable:
    """The environment variable of a field: its names, of which the first counts that is set, and what it may be."""

    names: tuple[str, ...]
    least: float = -inf
    most: float = inf
    choices: tuple[str, ...] = ()

    def check(self, value: Any) -> None:
        """Refuse what is not between the bounds, or not one of the choices."""
        if self.choices:
            _demand(value in self.choices, f"{self.names[0]}: must be one of {', '.join(self.choices)}")
        elif not isinstance(value, str):
            bounds = f"at least {self.least}" if self.most == inf else f"from {self.least} to {self.most}"
            _demand(self.least <= value <= self.most, f"{self.names[0]}: must be {bounds}")


def setting(
    *names: str, default: T, least: float = -inf, most: float = inf, choices: tuple[str, ...] = ()
) -> T:
    """Return a field that is read from an environment variable, as what its default is."""
    return field(default=default, metadata={"variable": Variable(names, least, most, choices)})


def check_all(config: Any) -> None:
    """Refuse a field whose value is not what its variable may be."""
    for each in fields(config):
        if "variable" in each.metadata:
            each.metadata["variable"].check(getattr(config, each.name))


def read(config: Any, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields whose variables are set, without the white space around them."""
    return {
        each.name: _value(name, text, type(each.default))
        for each in fields(config)
        if "variable" in each.metadata
        # The last one in a dictionary counts.
        for name in reversed(each.metadata["variable"].names)
        if (text := variables.get(name, "").strip())
    }


def _value(name: str, text: str, kind: type) -> object:
    if kind is bool:
        _demand(text.lower() in _FLAGS, f"{name}: must be true or false")
        return _FLAGS[text.lower()]
    if kind in _NUMBERS:
        pattern, otherwise = _NUMBERS[kind]
        _demand(pattern.fullmatch(text) is not None, f"{name}: {otherwise}")
    return kind(text)


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise SettingsError(otherwise)


@dataclass(frozen=True, slots=True)
class PetitionQueueConfig:
    """How many petitions may wait.

    Attributes:
        threshold: So many waiting petitions, and no more are taken.
        hysteresis: They are taken again once fewer than threshold - hysteresis wait.
        cache_ttl_seconds: How long the number of waiting petitions is believed before it is counted again.
        retry_after_seconds: `Retry-After` of a refusal.
    """

    threshold: int = setting("PETITION_QUEUE_THRESHOLD", default=10_000, least=1)
    hysteresis: int = setting("PETITION_QUEUE_HYSTERESIS", default=500, least=0)
    cache_ttl_seconds: float = setting("PETITION_QUEUE_CACHE_TTL", default=5.0, least=0, most=3600)
    retry_after_seconds: int = setting(
        "PETITION_RETRY_AFTER", "PETITION_QUEUE_RETRY_AFTER", default=60, least=1
    )

    def __post_init__(self) -> None:
        check_all(self)
        _demand(
            self.hysteresis < self.threshold,
            f"PETITION_QUEUE_HYSTERESIS: must be below PETITION_QUEUE_THRESHOLD, {self.threshold}",
        )
        _demand(self.cache_ttl_seconds > 0, "PETITION_QUEUE_CACHE_TTL: must be above 0")


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

    limit_per_hour: int = setting("PETITION_RATE_LIMIT_PER_HOUR", default=10, least=1, most=LARGEST_LIMIT)
    window_minutes: int = setting(
        "PETITION_RATE_LIMIT_WINDOW_MINUTES", default=60, least=1, most=LONGEST_WINDOW_MINUTES
    )
    bucket_ttl_hours: int = setting("PETITION_RATE_LIMIT_TTL_HOURS", default=2)
    strict: bool = setting("PETITION_RATE_LIMIT_STRICT", default=False)
    realm_limit: int = setting("PETITION_RATE_LIMIT_PER_REALM", default=0, least=0, most=LARGEST_LIMIT)
    global_limit: int = setting("PETITION_RATE_LIMIT_GLOBAL", default=0, least=0, most=LARGEST_LIMIT)
    co_sign_limit_per_hour: int = setting(
        "PETITION_CO_SIGN_LIMIT_PER_HOUR", default=50, least=1, most=LARGEST_LIMIT
    )

    def __post_init__(self) -> None:
        check_all(self)
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
    variables = os.environ if variables is None else variables
    queue = read(PetitionQueueConfig, variables)
    if "threshold" in queue:
        # A small threshold alone gets the same proportion instead of a start that fails.
        queue = {"hysteresis": min(500, max(0, queue["threshold"]) // 20), **queue}
    return PetitionQueueConfig(**queue), PetitionRateLimitConfig(**read(PetitionRateLimitConfig, variables))


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
    pool_size: int = setting("PETITION_DATABASE_POOL_SIZE", default=10, least=1)
    database_timeout: float = setting("PETITION_DATABASE_TIMEOUT", default=5.0, least=0.1)
    outage_seconds: float = setting("PETITION_DATABASE_OUTAGE_SECONDS", default=30.0, least=0)
    anonymous: Anonymous = setting(  # noqa: RUF009  # a field, which ruff sees only of simpler types
        "PETITION_ANONYMOUS", default="address", choices=get_args(Anonymous)
    )
    proxies: Proxies | None = None
    default_realm: str = setting("PETITION_DEFAULT_REALM", default=REALMS[0], choices=REALMS)
    cleanup_interval_seconds: float = setting("PETITION_CLEANUP_INTERVAL_SECONDS", default=1_800.0, least=0.1)
    status_wait_seconds: float = setting("PETITION_STATUS_WAIT_SECONDS", default=30.0, least=0)
    metrics_max_submitters: int = setting("PETITION_METRICS_MAX_SUBMITTERS", default=1_000, least=0)
    service_name: str = setting("SERVICE_NAME", default="archon72-api")
    environment: str = setting("ENVIRONMENT", default="development")
    host: str = setting("HOST", default="127.0.0.1")
    port: int = setting("PORT", default=8000, least=0, most=65_535)
    log_level: str = setting("LOG_LEVEL", default="INFO", choices=_LEVELS)

    def __post_init__(self) -> None:
        check_all(self)


def load_settings(variables: Mapping[str, str] | None = None) -> PetitionsSettings:
    """Return the settings from these variables, by default the environment's.

    Raises:
        SettingsError: One of them cannot work; the message begins with its name.
    """
    variables = os.environ if variables is None else variables
    queue, rate_limit = load_petition_config(variables)
    given = read(PetitionsSettings, variables)
    if "log_level" in given:
        given["log_level"] = given["log_level"].upper()
    data_dir = variables.get("PETITION_DATA_DIR", "").strip()
    return PetitionsSettings(
        queue=queue,
        rate_limit=rate_limit,
        database_url=_database_url(variables.get("DATABASE_URL", "").strip()),
        data_dir=Path(data_dir).absolute() if data_dir else _default_data_dir(variables),
        proxies=_proxies(variables.get("TRUSTED_PROXIES", "")),
        **given,
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
