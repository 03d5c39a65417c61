"""Settings, read from the environment."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from headgate_services.common.settings import SettingsError
from headgate_services.mail.config import Settings, load_settings

PER_MINUTE = "GLOBAL_SEND_RATE_LIMIT_PER_MINUTE"
PER_HOUR = "GLOBAL_SEND_RATE_LIMIT_PER_HOUR"


@pytest.mark.requirement("N-01", "N-02", "N-09")
def test_n09_both_limits_are_whole_numbers_and_0_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings()
    assert settings.global_send_rate_limit_per_minute == 0
    assert settings.global_send_rate_limit_per_hour == 0
    monkeypatch.setenv(PER_MINUTE, "5")
    monkeypatch.setenv(PER_HOUR, " 50 ")
    settings = Settings()
    assert settings.global_send_rate_limit_per_minute == 5
    assert settings.global_send_rate_limit_per_hour == 50


@pytest.mark.requirement("N-03")
def test_nx8_an_empty_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PER_MINUTE, "")
    assert Settings().global_send_rate_limit_per_minute == 0


@pytest.mark.requirement("N-08", "N-10")
@pytest.mark.parametrize("variable", [PER_MINUTE, PER_HOUR])
@pytest.mark.parametrize("value", ["-1", "abc", "1.5", "5.0", "1_000", "٣", "true", str(2**60)])
def test_n08_n10_only_whole_numbers_from_0_are_limits(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValidationError, match=variable):
        Settings()
    with pytest.raises(SettingsError, match=f"^{variable}: "):
        load_settings()


def test_every_wrong_setting_is_named_and_no_value_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PER_MINUTE, "-1")
    monkeypatch.setenv("SMTP_PORT", "secret")
    monkeypatch.setenv("DATABASE_URL", "mysql://user:secret@host/db")
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [PER_MINUTE, "SMTP_PORT"]
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"ENVIRONMENT": "production", "CORS_ORIGINS": "https://a.example"}, "API_KEY"),
        ({"ENVIRONMENT": "staging", "API_KEY": "k"}, "CORS_ORIGINS"),
        ({"ENVIRONMENT": "staging", "API_KEY": "k", "CORS_ORIGINS": "https://a.example,*"}, "CORS_ORIGINS"),
        ({"CORS_ORIGINS": "https://a.example,*"}, "CORS_ORIGINS: .* must stand alone"),
        ({"CORS_ORIGINS": "a.example"}, "CORS_ORIGINS: 'a.example' is not an origin"),
        ({"CORS_ORIGINS": "https://a.example/"}, "CORS_ORIGINS"),
        ({"CORS_ORIGINS": "https://*.example"}, "CORS_ORIGINS"),
        ({"ENVIRONMENT": "testing"}, "ENVIRONMENT"),
        ({"EMAIL_PROVIDER": "pigeon"}, "EMAIL_PROVIDER"),
        ({"LOG_LEVEL": "loud"}, "LOG_LEVEL"),
        ({"OUTBOUND_DOMAIN_BLOCKLIST": r"ok\.com, a(b"}, r"OUTBOUND_DOMAIN_BLOCKLIST: 'a\(b' is not"),
        ({"INBOUND_DOMAIN_ALLOWLIST": "*.com"}, r"INBOUND_DOMAIN_ALLOWLIST: '\*\.com' is not"),
        ({"DB_DRIVER": "postgres"}, "DATABASE_URL"),
        ({"DB_DRIVER": "postgres", "DATABASE_URL": "sqlite:///x.db"}, "DATABASE_URL.*DB_DRIVER"),
        ({"DATABASE_URL": "mysql://user:secret@host/db"}, "DATABASE_URL"),
        ({"DATABASE_URL": "postgresql://host:port/db"}, "DATABASE_URL"),
        ({"DATABASE_URL": "postgresql"}, "DATABASE_URL"),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    given: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=named) as caught:
        load_settings()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "driver"),
    [
        ("", "sqlite+aiosqlite"),
        ("sqlite:///x.db", "sqlite+aiosqlite"),
        ("postgresql://user@host/name", "postgresql+psycopg"),
        ("postgres://user@host/name", "postgresql+psycopg"),
        ("postgresql+asyncpg://user@host/name", "postgresql+psycopg"),
    ],
)
def test_the_database_url_says_which_database(url: str, driver: str) -> None:
    assert Settings(database_url=url).sqlalchemy_url().drivername == driver


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"email_provider": "demo"}, []),
        ({"email_provider": "smtp"}, ["SMTP_HOST"]),
        ({"email_provider": "imap-smtp"}, ["SMTP_HOST"]),
        ({"email_provider": "mailgun"}, ["MAILGUN_API_KEY", "MAILGUN_DOMAIN"]),
        ({"email_provider": "sendgrid"}, ["SENDGRID_API_KEY"]),
        ({"email_provider": "resend"}, ["RESEND_API_KEY"]),
        ({"email_provider": "ses"}, ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"]),
        ({"email_provider": "smtp", "smtp_host": "h", "smtp_username": "u"}, ["SMTP_PASSWORD"]),
        ({"email_provider": "smtp", "smtp_host": "h", "smtp_password": "p"}, ["SMTP_USERNAME"]),
        ({"email_provider": "smtp", "smtp_host": "h"}, []),
        ({"email_provider": "smtp", "smtp_host": "h", "smtp_username": "u", "smtp_password": "p"}, []),
    ],
)
def test_missing_credentials_are_listed(given: dict[str, Any], missing: list[str]) -> None:
    assert Settings(**given).missing_credentials == missing


def test_secrets_stay_out_of_the_representation() -> None:
    settings = Settings(
        api_key=SecretStr("hush1"),
        smtp_password=SecretStr("hush2"),
        database_url="postgresql://u:hush3@h/n",
        rate_limit_store="redis://:hush4@h",
    )
    assert "hush" not in repr(settings)
