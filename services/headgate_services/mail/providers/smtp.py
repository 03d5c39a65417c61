"""Sending through an SMTP server, one connection per e-mail.

If the server refuses one recipient, the e-mail is not sent to any of them. So a failed send can be repeated safely.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import EmailMessage
from email.policy import SMTP, SMTPUTF8
from typing import Unpack

import aiosmtplib

from headgate_services.mail.providers.base import MailOptions, ProviderError, all_recipients
from headgate_services.mail.providers.mime import build_message

_QUIT_SECONDS = 2.0  # time limit for the reply to QUIT, after the server accepted the e-mail


@dataclass(frozen=True, slots=True)
class SmtpProvider:
    """Sends e-mail through an SMTP server.

    Attributes:
        tls: The TLS context; `None` sends everything, including credentials, as plain text.
        implicit_tls: Whether to encrypt from the first byte; otherwise STARTTLS is required.
        timeout: Time limit for one e-mail in seconds, from connecting to the server's final reply.
    """

    host: str
    port: int
    username: str = ""
    password: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None
    implicit_tls: bool = False
    timeout: float = 30.0
    name: str = "smtp"

    async def send_email(
        self, to: Sequence[str], subject: str, body: str, **options: Unpack[MailOptions]
    ) -> str | None:
        """Send one e-mail, and return its Message-ID; SMTP servers return no other id."""
        try:
            message = build_message(to, subject, body, options)
        except ValueError as error:
            raise ProviderError(f"the message cannot be written: {error}") from error
        await self._transmit(message, options["from_address"], all_recipients(to, options))
        return options.get("message_id")

    async def _transmit(self, message: EmailMessage, sender: str, recipients: Sequence[str]) -> None:
        client = aiosmtplib.SMTP(
            hostname=self.host,
            port=self.port,
            username=self.username or None,
            password=self.password or None,
            local_hostname=sender.rpartition("@")[2],  # avoids a DNS lookup of this machine's name
            timeout=self.timeout,
            use_tls=self.tls is not None and self.implicit_tls,
            start_tls=self.tls is not None and not self.implicit_tls,
            tls_context=self.tls,
        )
        try:
            async with asyncio.timeout(self.timeout):
                await client.connect()
                await _hand_over(client, message, sender, recipients)
            # The server accepted the e-mail, so later errors on the connection do not matter.
            with suppress(aiosmtplib.SMTPException):
                await client.quit(timeout=min(self.timeout, _QUIT_SECONDS))
        except aiosmtplib.SMTPResponseException as error:
            raise ProviderError(f"the server answered {error.code} {error.message}") from error
        except TimeoutError as error:
            raise ProviderError(f"no answer within {self.timeout:g} s") from error
        except (aiosmtplib.SMTPException, OSError) as error:
            raise ProviderError(f"{self.host}:{self.port}: {error}") from error
        finally:
            client.close()


async def _hand_over(
    client: aiosmtplib.SMTP, message: EmailMessage, sender: str, recipients: Sequence[str]
) -> None:
    plain = all(address.isascii() for address in (sender, *recipients))
    await client.ehlo()
    if not plain and not client.supports_extension("smtputf8"):
        raise ProviderError("the server accepts ASCII addresses only")
    encoding, options = ("ascii", []) if plain else ("utf-8", ["SMTPUTF8", "BODY=8BITMIME"])
    await client.mail(sender, options=options, encoding=encoding)
    for recipient in recipients:
        await client.rcpt(recipient, encoding=encoding)
    await client.data(message.as_bytes(policy=SMTP if plain else SMTPUTF8))
