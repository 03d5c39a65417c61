"""What a provider is: whoever takes an e-mail off our hands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


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


class EmailProvider(Protocol):
    """Sends e-mail."""

    @property
    def name(self) -> str:
        """What `EMAIL_PROVIDER` calls it."""

    async def send_email(
        self,
        to: Sequence[str],
        subject: str,
        body: str,
        *,
        from_address: str,
        reply_to: str | None = None,
        headers: Mapping[str, str] | None = None,
        message_id: str | None = None,
        in_reply_to: str | None = None,
        references: Sequence[str] | None = None,
        cc: Sequence[str] | None = None,
        bcc: Sequence[str] | None = None,
        attachments: Sequence[OutgoingAttachment] | None = None,
        html_body: str | None = None,
    ) -> str | None:
        """Hand one e-mail over, and return the provider's id for it, if it gave one.

        Returning means that it was accepted; everything raised means that it was not. `message_id`, `in_reply_to` and
        `references` are in angle brackets, as they stand in the header.
        """
