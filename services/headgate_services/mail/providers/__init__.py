"""E-mail providers, by their name in `EMAIL_PROVIDER`."""

from __future__ import annotations

import ssl

from headgate.clock import Clock
from headgate_services.common.settings import SettingsError
from headgate_services.mail.config import Settings
from headgate_services.mail.providers.base import EmailProvider, OutgoingAttachment, ProviderError
from headgate_services.mail.providers.demo import DemoProvider
from headgate_services.mail.providers.http_apis import APIS, Account, HttpProvider
from headgate_services.mail.providers.smtp import SmtpProvider
from headgate_services.mail.storage.database import MailDatabase

__all__ = [
    "DemoProvider",
    "EmailProvider",
    "HttpProvider",
    "OutgoingAttachment",
    "ProviderError",
    "SmtpProvider",
    "build_provider",
]

IMPLICIT_TLS_PORT = 465


def build_provider(settings: Settings, database: MailDatabase, clock: Clock) -> EmailProvider | None:
    """Return the configured provider; `None` if credentials are missing.

    Raises:
        SettingsError: `SMTP_CA_FILE` cannot be read.
    """
    if settings.missing_credentials:
        return None
    if settings.email_provider == "demo":
        return DemoProvider(database, clock)
    if settings.email_provider in APIS:
        return HttpProvider(
            settings.email_provider, _account(settings), settings.email_api_base, settings.email_api_timeout
        )
    return SmtpProvider(
        host=settings.smtp_host,
        port=settings.smtp_port,
        username=settings.smtp_username,
        password=settings.smtp_password.get_secret_value(),
        tls=_tls_context(settings) if settings.smtp_use_tls else None,
        implicit_tls=settings.smtp_port == IMPLICIT_TLS_PORT,
        timeout=settings.smtp_timeout,
    )


def _account(settings: Settings) -> Account:
    if settings.email_provider == "ses":
        return Account(
            settings.aws_secret_access_key.get_secret_value(),
            settings.aws_access_key_id,
            settings.aws_session_token.get_secret_value(),
            region=settings.aws_region,
        )
    keys = {
        "mailgun": settings.mailgun_api_key,
        "sendgrid": settings.sendgrid_api_key,
        "resend": settings.resend_api_key,
    }
    return Account(
        keys[settings.email_provider].get_secret_value(),
        domain=settings.mailgun_domain or settings.email_domain,
    )


def _tls_context(settings: Settings) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=settings.smtp_ca_file or None)
    except OSError as error:  # ssl.SSLError too, for a file without certificates
        raise SettingsError(f"SMTP_CA_FILE: {error}") from error
