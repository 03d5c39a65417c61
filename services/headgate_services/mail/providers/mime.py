"""An e-mail as it goes over the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime

from headgate_services.mail.providers.base import OutgoingAttachment


def build_message(
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
    attachments: Sequence[OutgoingAttachment] | None = None,
    html_body: str | None = None,
) -> EmailMessage:
    """Return the message, without the recipients whom the others must not see.

    Raises:
        ValueError: A header cannot be written, for example because an address has a line break in it.
    """
    message = EmailMessage(policy=SMTP)
    fields = {
        "From": from_address,
        "To": ", ".join(to),
        "Cc": ", ".join(cc or ()),
        "Reply-To": reply_to,
        "Subject": " ".join(subject.split()),  # a line break would end the header
        "Date": format_datetime(datetime.now(UTC)),
        "Message-ID": message_id,
        "In-Reply-To": in_reply_to,
        "References": " ".join(references or ()),
        **(headers or {}),
    }
    for name, value in fields.items():
        if value:
            message[name] = value
    message.set_content(body)
    if html_body is not None:
        message.add_alternative(html_body, subtype="html")
    for attachment in attachments or ():
        _attach(message, attachment)
    return message


def _attach(message: EmailMessage, attachment: OutgoingAttachment) -> None:
    maintype, subtype, parameters = _content_type(attachment.content_type)
    message.add_attachment(
        attachment.content,
        maintype=maintype,
        subtype=subtype,
        params=parameters,
        filename=attachment.filename,
        disposition=attachment.disposition,
        cid=None if attachment.content_id is None else f"<{attachment.content_id.strip('<>')}>",
    )


def _content_type(text: str) -> tuple[str, str, dict[str, str]]:
    """Return the parts of a content type; what cannot be attached under its own name is sent as plain bytes."""
    part = EmailMessage()
    part["Content-Type"] = text
    header = part["Content-Type"]
    if header.defects or header.maintype in ("multipart", "message"):
        return "application", "octet-stream", {}
    return header.maintype, header.subtype, dict(header.params)
