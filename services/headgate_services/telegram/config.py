"""Settings of the bot, from environment variables."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar, get_args
from urllib.parse import urlsplit

from headgate import ConfigError, Quota
from headgate.quota import MAX_PERIOD_US, MAX_UNITS
from headgate.urls import check_credentials
from headgate_services.common.settings import split_list

Algorithm = Literal["fixed_window", "sliding_window"]

MICROSECONDS_PER_MS = 1000

DEFAULT_MAX = 20
DEFAULT_WINDOW_MS = 3_600_000
DEFAULT_KV = "sqlite:///telegram-ratelimit.db"
DEFAULT_UPDATES_KV = "sqlite:///telegram-updates.db"
DEFAULT_AGENT_TIMEOUT = 30
_LONGEST_AGENT_TIMEOUT = 3600
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
_HIGHEST_PORT = 65_535

_logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TelegramSettings:
    """The settings; docs/services/telegram.md describes each of them.

    Raises:
        ConfigError: A setting is missing or invalid, or two settings contradict each other.
    """

    bot_token: str = field(repr=False)
    webhook_secret: str = field(repr=False)
    allowed_user_ids: frozenset[str] = frozenset()
    rate_limit_max: int = DEFAULT_MAX
    rate_limit_window_ms: int = DEFAULT_WINDOW_MS
    rate_limit_algorithm: Algorithm = "fixed_window"
    rate_limit_kv: str = field(default=DEFAULT_KV, repr=False)  # a Redis URL may hold a password
    seen_updates_kv: str = field(default="", repr=False)
    rate_limit_replies: str | None = None
    telegram_api_base: str = "https://api.telegram.org"
    agent_url: str | None = None
    agent_handler: str | None = None
    agent_timeout: int = DEFAULT_AGENT_TIMEOUT
    cloudflare_account_id: str = ""
    cloudflare_kv_namespace_id: str = ""
    cloudflare_api_token: str = field(default="", repr=False)
    cloudflare_api_base: str | None = None
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT

    def __post_init__(self) -> None:
        if not self.bot_token.strip():
            raise ConfigError(
                "TELEGRAM_BOT_TOKEN is missing; set it to the token that you got from BotFather"
            )
        if not self.webhook_secret.strip():
            raise ConfigError(
                "TELEGRAM_WEBHOOK_SECRET is missing; without it, anyone could send messages to the bot. "
                "Choose 1 to 256 of the characters A-Z, a-z, 0-9, _ and -"
            )
        if self.agent_url and self.agent_handler:
            raise ConfigError("AGENT_URL and AGENT_HANDLER are both set; set only one of them")
        if self.rate_limit_replies is not None:
            Quota.parse(self.rate_limit_replies)
        for name, url in {
            "RATE_LIMIT_KV": self.rate_limit_kv,
            "SEEN_UPDATES_KV": self.seen_updates_kv,
            "AGENT_URL": self.agent_url,
            "TELEGRAM_API_BASE": self.telegram_api_base,
            "CLOUDFLARE_API_BASE": self.cloudflare_api_base,
        }.items():
            _check_url(name, url)
        if self.seen_updates_kv == self.rate_limit_kv and not self.counts_in_memory:
            raise ConfigError(
                "SEEN_UPDATES_KV: is the namespace of RATE_LIMIT_KV, which is for counts only; use another file or "
                "database, or a prefix such as redis://host/0?prefix=updates:"
            )

    @property
    def log_level(self) -> str:
        """The log level; the bot has no setting for it."""
        return "INFO"

    @property
    def counts_in_memory(self) -> bool:
        """Whether each process counts separately."""
        return self.rate_limit_kv.lower().startswith("memory:")

    @property
    def updates_kv(self) -> str:
        """The URL of the store for ids of updates: by default memory if the counts are in memory, otherwise a file."""
        return self.seen_updates_kv or ("memory://" if self.counts_in_memory else DEFAULT_UPDATES_KV)

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> TelegramSettings:
        """Read the settings from environment variables; an invalid number is logged and replaced by its default."""
        return cls(
            bot_token=env.get("TELEGRAM_BOT_TOKEN", "").strip(),
            webhook_secret=env.get("TELEGRAM_WEBHOOK_SECRET", "").strip(),
            allowed_user_ids=_user_ids(env.get("ALLOWED_USER_IDS", "")),
            rate_limit_max=_whole(env, "RATE_LIMIT_MAX", DEFAULT_MAX, MAX_UNITS),
            rate_limit_window_ms=_whole(
                env, "RATE_LIMIT_WINDOW_MS", DEFAULT_WINDOW_MS, MAX_PERIOD_US // MICROSECONDS_PER_MS
            ),
            rate_limit_algorithm=_algorithm(env),
            rate_limit_kv=env.get("RATE_LIMIT_KV", "").strip() or DEFAULT_KV,
            seen_updates_kv=env.get("SEEN_UPDATES_KV", "").strip(),
            rate_limit_replies=env.get("RATE_LIMIT_REPLIES", "").strip() or None,
            telegram_api_base=env.get("TELEGRAM_API_BASE", "").strip() or "https://api.telegram.org",
            agent_url=env.get("AGENT_URL", "").strip() or None,
            agent_handler=env.get("AGENT_HANDLER", "").strip() or None,
            agent_timeout=_whole(env, "AGENT_TIMEOUT", DEFAULT_AGENT_TIMEOUT, _LONGEST_AGENT_TIMEOUT),
            cloudflare_account_id=env.get("CLOUDFLARE_ACCOUNT_ID", "").strip(),
            cloudflare_kv_namespace_id=env.get("CLOUDFLARE_KV_NAMESPACE_ID", "").strip(),
            cloudflare_api_token=env.get("CLOUDFLARE_API_TOKEN", "").strip(),
            cloudflare_api_base=env.get("CLOUDFLARE_API_BASE", "").strip() or None,
            host=env.get("HOST", "").strip() or DEFAULT_HOST,
            port=_whole(env, "PORT", DEFAULT_PORT, _HIGHEST_PORT),
        )


def _check_url(name: str, url: str | None) -> None:
    try:
        check_credentials(url or "")
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    if url and not name.endswith("_KV") and not _is_web_address(url):
        # Without the value, which may contain a password.
        raise ConfigError(f"{name}: must be an http:// or https:// URL, such as https://agent.example.org/")


def _is_web_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # invalid host or port
        return False


def _user_ids(text: str) -> frozenset[str]:
    """Return the user ids of a comma-separated list."""
    entries = frozenset(split_list(text))
    names = sorted(entry for entry in entries if not (entry.isascii() and entry.isdigit()))
    if names:
        raise ConfigError(
            f"ALLOWED_USER_IDS: {', '.join(map(repr, names))} is not a user id; use numbers such as 42, because names "
            "can change"
        )
    return entries


def _whole(env: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = env.get(name)
    if text is None:
        return default
    digits = text.strip()
    # int() also accepts "1_000" and digits of other scripts, and fails for 5,000 digits.
    if digits.isascii() and digits.isdigit() and len(digits) <= 20 and 1 <= int(digits) <= most:
        return int(digits)
    return _instead(name, text, f"a whole number from 1 to {most}", default)


def _algorithm(env: Mapping[str, str]) -> Algorithm:
    text = env.get("RATE_LIMIT_ALGORITHM", "fixed_window")
    for known in get_args(Algorithm):
        if text.strip().lower() == known:
            found: Algorithm = known
            return found
    return _instead("RATE_LIMIT_ALGORITHM", text, " or ".join(get_args(Algorithm)), "fixed_window")


def _instead(name: str, text: str, expected: str, default: T) -> T:
    _logger.warning("%s=%r is not %s; using %s", name, text, expected, default)
    return default
