"""Settings of the mail service."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import NoDecode
from sqlalchemy import URL

from headgate.quota import MAX_UNITS
from headgate_services.common.databases import database_url
from headgate_services.common.environment import ServiceSettings, load, parsed_by
from headgate_services.common.settings import LogLevel, WholeNumber, split_list
from headgate_services.mail.domain_filter import compile_patterns

DEMO_DOMAIN = "demo.nornweave.local"
DEFAULT_DATABASE = "sqlite:///headgate-mail.db"
MEGABYTE = 1024 * 1024

_ORIGIN = re.compile(r"https?://[^\s/@?#*]+", re.IGNORECASE)


def _provider(value: object) -> object:
    return "smtp" if value == "imap-smtp" else value  # the name in NornWeave, which can also fetch mail


def _origins(text: str) -> tuple[str, ...]:
    origins = split_list(text)
    if "*" in origins and len(origins) > 1:
        raise ValueError("* must stand alone: it allows every origin")
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(f"{origin!r} is not an origin; write https://app.example.com, without a path")
    return origins


SendLimit = Annotated[WholeNumber, Field(ge=0, le=MAX_UNITS)]
Patterns = Annotated[tuple[re.Pattern[str], ...], NoDecode, parsed_by(compile_patterns)]


class Settings(ServiceSettings):
    """The settings of the mail service."""

    global_send_rate_limit_per_minute: SendLimit = 0
    global_send_rate_limit_per_hour: SendLimit = 0
    rate_limit_store: str = Field(default="memory://", repr=False)

    email_provider: Annotated[
        Literal["demo", "smtp", "mailgun", "sendgrid", "resend", "ses"], BeforeValidator(_provider)
    ] = "demo"
    email_domain: str = ""
    smtp_host: str = ""
    smtp_port: int = Field(default=587, ge=1, le=65535)
    smtp_username: str = ""
    smtp_password: SecretStr = SecretStr("")
    smtp_use_tls: bool = True
    smtp_ca_file: str = ""
    smtp_timeout: float = Field(default=30.0, gt=0, le=3600)
    mailgun_api_key: SecretStr = SecretStr("")
    mailgun_domain: str = ""
    sendgrid_api_key: SecretStr = SecretStr("")
    resend_api_key: SecretStr = SecretStr("")
    aws_access_key_id: str = ""
    aws_secret_access_key: SecretStr = SecretStr("")
    aws_session_token: SecretStr = SecretStr("")
    aws_region: str = ""
    email_api_base: str = Field(default="", pattern=r"^(https?://[^\s@]+)?$")
    email_api_timeout: float = Field(default=30.0, gt=0, le=3600)

    outbound_domain_allowlist: Patterns = ()
    outbound_domain_blocklist: Patterns = ()
    inbound_domain_allowlist: Patterns = ()
    inbound_domain_blocklist: Patterns = ()

    attachment_max_size_mb: int = Field(default=25, ge=1, le=1024)
    attachment_max_total_size_mb: int = Field(default=35, ge=1, le=1024)
    attachment_max_count: int = Field(default=20, ge=0, le=1000)

    db_driver: Literal["sqlite", "postgres"] | None = None
    database_url: str = Field(default="", repr=False)
    database_timeout: float = Field(default=5.0, ge=0.1, le=600)

    environment: Literal["development", "staging", "production"] = "development"
    api_key: SecretStr = SecretStr("")
    cors_origins: Annotated[tuple[str, ...], NoDecode, parsed_by(_origins)] = ("*",)
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    log_level: LogLevel = "INFO"

    @model_validator(mode="after")
    def _guarded_outside_development(self) -> Settings:
        if self.environment == "development":
            return self
        if not self.api_key.get_secret_value():
            raise ValueError(f"API_KEY: must be set when ENVIRONMENT is {self.environment}")
        if "*" in self.cors_origins or not self.cors_origins:
            raise ValueError(
                f"CORS_ORIGINS: must name the origins one by one when ENVIRONMENT is {self.environment}"
            )
        return self

    @model_validator(mode="after")
    def _database_is_known(self) -> Settings:
        self.sqlalchemy_url()
        return self

    @property
    def separate_counts(self) -> str:
        """The counts that each process keeps separately, and the setting that moves them, or an empty text."""
        is_limited = self.global_send_rate_limit_per_minute or self.global_send_rate_limit_per_hour
        if is_limited and self.rate_limit_store.startswith("memory:"):
            return "the send limit is in memory; set RATE_LIMIT_STORE to a shared store"
        return ""

    @property
    def inbox_domain(self) -> str:
        """The domain of new inboxes; empty if not configured."""
        return self.email_domain or (DEMO_DOMAIN if self.email_provider == "demo" else "")

    @property
    def missing_credentials(self) -> list[str]:
        """Variables that the provider needs and that are not set."""
        password = self.smtp_password.get_secret_value()
        needed: dict[str, dict[str, object]] = {
            "smtp": {
                "SMTP_HOST": self.smtp_host,
                "SMTP_USERNAME": self.smtp_username or not password,
                "SMTP_PASSWORD": password or not self.smtp_username,
            },
            "mailgun": {
                "MAILGUN_API_KEY": self.mailgun_api_key.get_secret_value(),
                "MAILGUN_DOMAIN": self.mailgun_domain or self.email_domain,
            },
            "sendgrid": {"SENDGRID_API_KEY": self.sendgrid_api_key.get_secret_value()},
            "resend": {"RESEND_API_KEY": self.resend_api_key.get_secret_value()},
            "ses": {
                "AWS_ACCESS_KEY_ID": self.aws_access_key_id,
                "AWS_SECRET_ACCESS_KEY": self.aws_secret_access_key.get_secret_value(),
                "AWS_REGION": self.aws_region,
            },
        }
        return [variable for variable, value in needed.get(self.email_provider, {}).items() if not value]

    def sqlalchemy_url(self) -> URL:
        """Return the URL of the database with its driver.

        Raises:
            ValueError: `DATABASE_URL` or `DB_DRIVER` is invalid, or they contradict each other.
        """
        if self.db_driver == "postgres" and not self.database_url:
            raise ValueError("DATABASE_URL: must be set when DB_DRIVER is postgres")
        try:
            url = database_url(self.database_url or DEFAULT_DATABASE)
        except ValueError as error:
            raise ValueError(f"DATABASE_URL: {error}") from None
        database = url.get_backend_name().removesuffix("ql")
        if self.db_driver not in (None, database):
            raise ValueError(f"DATABASE_URL: is for {database}, but DB_DRIVER is {self.db_driver}")
        return url


load_settings = partial(load, Settings)
