"""The interface of e-mail providers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, Required, TypedDict, Unpack

from headgate_services.mail.domain_filter import bare_address


class ProviderError(Exception):
    """The provider did not accept the e-mail. The message has the reason and may be shown to the caller."""


@dataclass(frozen=True, slots=True)
class OutgoingAttachment:
    """An attachment of an e-mail.

    Attributes:
        disposition: `attachment` or `inline`.
        content_id: The Content-ID, without angle brackets.
    """

    filename: str
    content_type: str
    content: bytes = field(repr=False)
    disposition: str = "attachment"
    content_id: str | None = None


class MailOptions(TypedDict, total=False):
    """Optional parts of an e-mail, besides recipients, subject and text.

    `message_id`, `in_reply_to` and `references` include the angle brackets.
    """

    from_address: Required[str]
    message_id: str | None
    in_reply_to: str | None
    references: Sequence[str] | None
    cc: Sequence[str] | None
    bcc: Sequence[str] | None
    attachments: Sequence[OutgoingAttachment] | None
    html_body: str | None


def all_recipients(to: Sequence[str], options: MailOptions) -> list[str]:
    """Return the addresses of all recipients, each once and without names."""
    everyone = [*to, *(options.get("cc") or ()), *(options.get("bcc") or ())]
    return list(dict.fromkeys(map(bare_address, everyone)))


class EmailProvider(Protocol):
    """A service that accepts e-mail for delivery."""

    @property
    def name(self) -> str:
        """The name in `EMAIL_PROVIDER`."""

    async def send_email(
        self, to: Sequence[str], subject: str, body: str, **options: Unpack[MailOptions]
    ) -> str | None:
        """Send one e-mail, and return the provider's id for it, if any. Any exception means that it was not accepted."""
