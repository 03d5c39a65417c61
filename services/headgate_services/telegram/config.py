"""Settings of the bot."""

from __future__ import annotations

import logging
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationInfo, WrapValidator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from headgate import Quota
from headgate.quota import MAX_PERIOD_US, MAX_UNITS
from headgate.urls import check_credentials
from headgate_services.common.environment import ServiceSettings, load, parsed_by
from headgate_services.common.settings import WholeNumber, split_list

MICROSECONDS_PER_MS = 1000
DEFAULT_UPDATES_KV = "sqlite:///telegram-updates.db"

_logger = logging.getLogger(__name__)


def _or_default(value: object, validate: Any, info: ValidationInfo) -> Any:
    """Return the default, and log a warning, instead of an invalid value."""
    try:
        return validate(value)
    except ValueError:
        name = info.field_name or ""
        default = TelegramSettings.model_fields[name].default
        _logger.warning("%s=%r cannot be used; using %s", name.upper(), value, default)
        return default


def _user_ids(text: str) -> frozenset[str]:
    """Return the user ids of a comma-separated list."""
    entries = frozenset(split_list(text))
    names = sorted(entry for entry in entries if not (entry.isascii() and entry.isdigit()))
    if names:
        raise ValueError(
            f"{', '.join(map(repr, names))} is not a user id; use numbers such as 42, because names can change"
        )
    return entries


def _without_ambiguity(url: str) -> str:
    check_credentials(url)
    return url


def _web_address(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # invalid host or port
        is_valid = False
    if url and not is_valid:
        # Without the value, which may contain a password.
        raise ValueError("must be an http:// or https:// URL, such as https://agent.example.org/")
    return url


def _quota(text: str) -> str:
    Quota.parse(text)
    return text


Lenient = WrapValidator(_or_default)
Number = Annotated[WholeNumber, Field(ge=1)]
StoreUrl = Annotated[str, AfterValidator(_without_ambiguity)]
WebAddress = Annotated[StoreUrl, AfterValidator(_web_address)]


class TelegramSettings(ServiceSettings):
    """The settings of the bot; docs/services/telegram.md describes each of them."""

    model_config = SettingsConfigDict(str_strip_whitespace=True)
    with_blanks = frozenset(
        {"RATE_LIMIT_MAX", "RATE_LIMIT_WINDOW_MS", "RATE_LIMIT_ALGORITHM", "AGENT_TIMEOUT", "PORT"}
    )

    telegram_bot_token: str = Field(default="", repr=False)
    telegram_webhook_secret: str = Field(default="", repr=False)
    telegram_api_base: WebAddress = "https://api.telegram.org"
    allowed_user_ids: Annotated[frozenset[str], NoDecode, parsed_by(_user_ids)] = frozenset()

    rate_limit_max: Annotated[Number, Field(le=MAX_UNITS), Lenient] = 20
    rate_limit_window_ms: Annotated[Number, Field(le=MAX_PERIOD_US // MICROSECONDS_PER_MS), Lenient] = (
        3_600_000
    )
    rate_limit_algorithm: Annotated[
        Literal["fixed_window", "sliding_window"], parsed_by(lambda text: text.strip().lower()), Lenient
    ] = "fixed_window"
    rate_limit_kv: StoreUrl = Field(default="sqlite:///telegram-ratelimit.db", repr=False)
    rate_limit_replies: Annotated[str, AfterValidator(_quota)] | None = None
    seen_updates_kv: StoreUrl = Field(default="", repr=False)

    agent_url: WebAddress = ""
    agent_handler: str = ""
    agent_timeout: Annotated[Number, Field(le=3600), Lenient] = 30

    cloudflare_account_id: str = ""
    cloudflare_kv_namespace_id: str = ""
    cloudflare_api_token: str = Field(default="", repr=False)
    cloudflare_api_base: WebAddress = ""

    host: str = "127.0.0.1"
    port: Annotated[Number, Field(le=65535), Lenient] = 8000

    @model_validator(mode="after")
    def _is_complete(self) -> TelegramSettings:
        if not self.telegram_bot_token:
            raise ValueError(
                "TELEGRAM_BOT_TOKEN: is missing; set it to the token that you got from BotFather"
            )
        if not self.telegram_webhook_secret:
            raise ValueError(
                "TELEGRAM_WEBHOOK_SECRET: is missing; without it, anyone could send messages to the bot. "
                "Choose 1 to 256 of the characters A-Z, a-z, 0-9, _ and -"
            )
        if self.agent_url and self.agent_handler:
            raise ValueError("AGENT_URL: is set as well as AGENT_HANDLER; set only one of them")
        if self.seen_updates_kv == self.rate_limit_kv and not self.counts_in_memory:
            raise ValueError(
                "SEEN_UPDATES_KV: is the namespace of RATE_LIMIT_KV, which is for counts only; use another file or "
                "database, or a prefix such as redis://host/0?prefix=updates:"
            )
        return self

    @property
    def log_level(self) -> str:
        """The log level; the bot has no setting for it."""
        return "INFO"

    @property
    def counts_in_memory(self) -> bool:
        """Whether each process counts separately."""
        return self.rate_limit_kv.lower().startswith("memory:")

    @property
    def separate_counts(self) -> str:
        """The counts that each process keeps separately, and the setting that moves them, or an empty text."""
        hint = "the counts are in memory; set RATE_LIMIT_KV to a shared store"
        return hint if self.counts_in_memory else ""

    @property
    def updates_kv(self) -> str:
        """The URL of the store for ids of updates: by default memory if the counts are in memory, otherwise a file."""
        return self.seen_updates_kv or ("memory://" if self.counts_in_memory else DEFAULT_UPDATES_KV)


load_settings = partial(load, TelegramSettings)
