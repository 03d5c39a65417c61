"""What a provider is: a service that accepts an e-mail for delivery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Required, TypedDict, Unpack

from headgate_services.mail.domain_filter import bare_address


class ProviderError(Exception):
    """The provider did not take the e-mail; the message says why and may be shown to the caller."""


@dataclass(frozen=True, slots=True)
class OutgoingAttachment:
    """A file to go with an e-mail.

    Attributes:
        disposition: `attachment` or `inline`.
        content_id: What the text refers to it by, without angle brackets.
    """

    filename: str
    content_type: str
    content: bytes = field(repr=False)
    disposition: str = "attachment"
    content_id: str | None = None


class MailOptions(TypedDict, total=False):
    """What an e-mail has besides recipients, subject and text; what is not set is left out.

    `message_id`, `in_reply_to` and `references` are in angle brackets, as they stand in the header.
    """

    from_address: Required[str]
    reply_to: str | None
    headers: Mapping[str, str] | None
    message_id: str | None
    in_reply_to: str | None
    references: Sequence[str] | None
    cc: Sequence[str] | None
    bcc: Sequence[str] | None
    attachments: Sequence[OutgoingAttachment] | None
    html_body: str | None


def all_recipients(to: Sequence[str], options: MailOptions) -> list[str]:
    """Return the address of each recipient once, without names."""
    everyone = [*to, *(options.get("cc") or ()), *(options.get("bcc") or ())]
    return list(dict.fromkeys(map(bare_address, everyone)))


class EmailProvider(Protocol):
    """Sends e-mail."""

    @property
    def name(self) -> str:
        """What `EMAIL_PROVIDER` calls it."""

    async def send_email(
        self, to: Sequence[str], subject: str, body: str, **options: Unpack[MailOptions]
    ) -> str | None:
        """Hand one e-mail over, and return the provider's id for it, if it gave one.

        Returning means that it was accepted; everything raised means that it was not.
        """
