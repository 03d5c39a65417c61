"""E-mail providers, by their name in `EMAIL_PROVIDER`.

Only the module of the configured provider is imported, because the clients take a moment to import.
"""

from __future__ import annotations

import ssl

from headgate.clock import Clock
from headgate_services.common.settings import SettingsError
from headgate_services.mail.config import Settings
from headgate_services.mail.providers.base import EmailProvider, OutgoingAttachment, ProviderError
from headgate_services.mail.providers.demo import DemoProvider
from headgate_services.mail.storage.database import MailDatabase

__all__ = [
    "DemoProvider",
    "EmailProvider",
    "OutgoingAttachment",
    "ProviderError",
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
    return _smtp(settings) if settings.email_provider == "smtp" else _http_api(settings)


def _smtp(settings: Settings) -> EmailProvider:
    from headgate_services.mail.providers.smtp import SmtpProvider

    return SmtpProvider(
        host=settings.smtp_host,
        port=settings.smtp_port,
        username=settings.smtp_username,
        password=settings.smtp_password.get_secret_value(),
        tls=_tls_context(settings) if settings.smtp_use_tls else None,
        implicit_tls=settings.smtp_port == IMPLICIT_TLS_PORT,
        timeout=settings.smtp_timeout,
    )


def _http_api(settings: Settings) -> EmailProvider:
    from headgate_services.mail.providers.http_apis import Account, HttpProvider

    keys = {
        "mailgun": settings.mailgun_api_key,
        "sendgrid": settings.sendgrid_api_key,
        "resend": settings.resend_api_key,
        "ses": settings.aws_secret_access_key,
    }
    account = Account(
        keys[settings.email_provider].get_secret_value(),
        key_id=settings.aws_access_key_id,
        session_token=settings.aws_session_token.get_secret_value(),
        domain=settings.mailgun_domain or settings.email_domain,
        region=settings.aws_region,
    )
    return HttpProvider(settings.email_provider, account, settings.email_api_base, settings.email_api_timeout)


def _tls_context(settings: Settings) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=settings.smtp_ca_file or None)
    except OSError as error:  # ssl.SSLError too, for a file without certificates
        raise SettingsError(f"SMTP_CA_FILE: {error}") from error
