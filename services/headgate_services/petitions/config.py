"""Settings of the petitions service.

An invalid value is an error with the name of the variable, never replaced by a default. An empty variable counts as unset.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import psycopg
from psycopg.conninfo import conninfo_to_dict
from pydantic import AfterValidator, AliasChoices, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from headgate.http import Proxies
from headgate.urls import check_credentials
from headgate_services.common.settings import LogLevel, WholeNumber, read, split_list
from headgate_services.petitions.domain.models import REALMS

LONGEST_WINDOW_MINUTES = 1_440
LARGEST_LIMIT = 2**31 - 1
"""The maximum of the column `count`, an INTEGER."""

_CONFIG = ConfigDict(
    validate_by_name=True,
    validate_by_alias=True,
    arbitrary_types_allowed=True,
    allow_inf_nan=False,
    hide_input_in_errors=True,
)


def _variable(name: str, *others: str, **options: Any) -> Any:
    """Return a field that is read from an environment variable; of several names, the first that is set is used."""
    return Field(validation_alias=AliasChoices(name, *others) if others else name, **options)


def _realm(name: str) -> str:
    if name not in REALMS:
        raise ValueError(f"must be one of {', '.join(REALMS)}")
    return name


def _database_url(text: str) -> str:
    """Check the address of PostgreSQL, a URL or `host=… dbname=…`; errors do not repeat it."""
    check_credentials(text)
    scheme, is_url, _ = text.partition("://")
    if is_url and scheme.lower() not in ("postgresql", "postgres"):
        raise ValueError("must begin with postgresql://")
    try:
        conninfo_to_dict(text)
    except psycopg.Error:
        raise ValueError("is not a URL like postgresql://user@host/name") from None
    return text


def _proxies(value: Proxies | str | None) -> Proxies | None:
    if not isinstance(value, str):
        return value
    networks = split_list(value)
    return Proxies(networks) if networks else None


def _default_data_dir() -> Path:
    """Return the data folder of the user; for root, a folder below /var/lib.

    PostgreSQL does not run as root, and other users cannot read root's home.
    """
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        return Path("/var/lib/headgate/petitions")
    home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(home) / "headgate" / "petitions"


@dataclass(frozen=True, config=_CONFIG)
class PetitionQueueConfig:
    """Settings of the queue.

    Attributes:
        threshold: The number of waiting petitions at which no more are accepted.
        hysteresis: Petitions are accepted again below threshold - hysteresis.
        cache_ttl_seconds: The longest time between counts of the waiting petitions.
        retry_after_seconds: `Retry-After` of a refusal.
    """

    threshold: WholeNumber = _variable("PETITION_QUEUE_THRESHOLD", default=10_000, ge=1)
    hysteresis: WholeNumber = _variable("PETITION_QUEUE_HYSTERESIS", default=500, ge=0)
    cache_ttl_seconds: float = _variable("PETITION_QUEUE_CACHE_TTL", default=5.0, gt=0, le=3600)
    retry_after_seconds: WholeNumber = _variable(
        "PETITION_RETRY_AFTER", "PETITION_QUEUE_RETRY_AFTER", default=60, ge=1
    )

    def __post_init__(self) -> None:
        if self.hysteresis >= self.threshold:
            raise ValueError(
                f"PETITION_QUEUE_HYSTERESIS: must be below PETITION_QUEUE_THRESHOLD, {self.threshold}"
            )


@dataclass(frozen=True, config=_CONFIG)
class PetitionRateLimitConfig:
    """Settings of the limits.

    Attributes:
        limit_per_hour: The most petitions of a submitter in the window.
        window_minutes: The length of the window.
        bucket_ttl_hours: How long counters are kept; longer than the window.
        strict: Whether a petition counts from the end of its minute, so that no interval as long as the window contains
            more than the limit. Otherwise it counts from the beginning of its minute, as the document specifies.
        realm_limit: The most petitions to a realm in the window; 0 for unlimited.
        global_limit: The most petitions of all submitters in the window; 0 for unlimited.
        co_sign_limit_per_hour: The most co-signs of an identity in the window.
    """

    limit_per_hour: WholeNumber = _variable(
        "PETITION_RATE_LIMIT_PER_HOUR", default=10, ge=1, le=LARGEST_LIMIT
    )
    window_minutes: WholeNumber = _variable(
        "PETITION_RATE_LIMIT_WINDOW_MINUTES", default=60, ge=1, le=LONGEST_WINDOW_MINUTES
    )
    bucket_ttl_hours: WholeNumber = _variable("PETITION_RATE_LIMIT_TTL_HOURS", default=2)
    strict: bool = _variable("PETITION_RATE_LIMIT_STRICT", default=False)
    realm_limit: WholeNumber = _variable("PETITION_RATE_LIMIT_PER_REALM", default=0, ge=0, le=LARGEST_LIMIT)
    global_limit: WholeNumber = _variable("PETITION_RATE_LIMIT_GLOBAL", default=0, ge=0, le=LARGEST_LIMIT)
    co_sign_limit_per_hour: WholeNumber = _variable(
        "PETITION_CO_SIGN_LIMIT_PER_HOUR", default=50, ge=1, le=LARGEST_LIMIT
    )

    def __post_init__(self) -> None:
        if self.bucket_ttl_hours * 60 <= self.window_minutes:
            raise ValueError(
                f"PETITION_RATE_LIMIT_TTL_HOURS: must be longer than the window of {self.window_minutes} minutes"
            )


def load_petition_config(
    variables: Mapping[str, str] | None = None,
) -> tuple[PetitionQueueConfig, PetitionRateLimitConfig]:
    """Read both from these variables, by default the environment.

    Raises:
        SettingsError: A variable is invalid; the message begins with its name.
    """
    variables = os.environ if variables is None else variables
    threshold = variables.get("PETITION_QUEUE_THRESHOLD", "").strip()
    if threshold.isascii() and threshold.removeprefix("+").isdigit():
        # For a small threshold, the default hysteresis is 5 % of it, because it must be below the threshold.
        hysteresis = variables.get("PETITION_QUEUE_HYSTERESIS", "").strip()
        proportion = str(min(500, int(threshold[:18]) // 20))
        variables = {**variables, "PETITION_QUEUE_HYSTERESIS": hysteresis or proportion}
    return read(PetitionQueueConfig, variables), read(PetitionRateLimitConfig, variables)


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class PetitionsSettings:
    """The settings of the petition service.

    Attributes:
        queue: The settings of the queue.
        rate_limit: The limits.
        database_url: The address of PostgreSQL; empty for an embedded one.
        data_dir: The folder of the embedded PostgreSQL.
        pool_size: The most connections to the database.
        database_timeout: Time limit for a block in seconds, from requesting a connection to the last reply.
        outage_seconds: `Retry-After` while the database cannot be reached, in seconds.
        anonymous: How petitions without a submitter are counted: by `address`, `shared` by all, or not (`refuse`).
        proxies: Trusted proxies, whose forwarded addresses are used.
        default_realm: The realm of petitions without one.
        cleanup_interval_seconds: Seconds between removals of expired counters.
        status_wait_seconds: The longest wait for a new status.
        metrics_max_submitters: The number of submitters with separate metric series.
        separate_counts: Empty, because all counts are in the database.
    """

    separate_counts: ClassVar[str] = ""

    queue: PetitionQueueConfig = Field(default_factory=PetitionQueueConfig)
    rate_limit: PetitionRateLimitConfig = Field(default_factory=PetitionRateLimitConfig)
    database_url: Annotated[str, AfterValidator(_database_url)] = _variable(
        "DATABASE_URL", default="", repr=False
    )
    data_dir: Annotated[Path, AfterValidator(Path.absolute)] = _variable(
        "PETITION_DATA_DIR", default_factory=_default_data_dir
    )
    pool_size: WholeNumber = _variable("PETITION_DATABASE_POOL_SIZE", default=10, ge=1)
    database_timeout: float = _variable("PETITION_DATABASE_TIMEOUT", default=5.0, ge=0.1)
    outage_seconds: float = _variable("PETITION_DATABASE_OUTAGE_SECONDS", default=30.0, ge=0)
    anonymous: Literal["address", "shared", "refuse"] = _variable("PETITION_ANONYMOUS", default="address")
    proxies: Annotated[Proxies | None, BeforeValidator(_proxies)] = _variable("TRUSTED_PROXIES", default=None)
    default_realm: Annotated[str, AfterValidator(_realm)] = _variable(
        "PETITION_DEFAULT_REALM", default=REALMS[0]
    )
    cleanup_interval_seconds: float = _variable("PETITION_CLEANUP_INTERVAL_SECONDS", default=1_800.0, ge=0.1)
    status_wait_seconds: float = _variable("PETITION_STATUS_WAIT_SECONDS", default=30.0, ge=0)
    metrics_max_submitters: WholeNumber = _variable("PETITION_METRICS_MAX_SUBMITTERS", default=1_000, ge=0)
    service_name: str = _variable("SERVICE_NAME", default="archon72-api")
    environment: str = _variable("ENVIRONMENT", default="development")
    host: str = _variable("HOST", default="127.0.0.1")
    port: WholeNumber = _variable("PORT", default=8000, ge=0, le=65_535)
    log_level: LogLevel = _variable("LOG_LEVEL", default="INFO")


def load_settings(variables: Mapping[str, str] | None = None) -> PetitionsSettings:
    """Read the settings from these variables, by default the environment.

    Raises:
        SettingsError: A variable is invalid; the message begins with its name.
    """
    variables = os.environ if variables is None else variables
    queue, rate_limit = load_petition_config(variables)
    return replace(read(PetitionsSettings, variables), queue=queue, rate_limit=rate_limit)
