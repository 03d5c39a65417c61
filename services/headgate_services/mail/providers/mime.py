"""E-mails in MIME format."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime

from headgate_services.mail.providers.base import MailOptions, OutgoingAttachment


def build_message(to: Sequence[str], subject: str, body: str, options: MailOptions) -> EmailMessage:
    """Build the message, without the hidden recipients.

    Raises:
        ValueError: A header is invalid, for example an address with a line break.
    """
    message = EmailMessage(policy=SMTP)
    fields = {
        "From": options["from_address"],
        "To": ", ".join(to),
        "Cc": ", ".join(options.get("cc") or ()),
        "Subject": " ".join(subject.split()),  # a line break would end the header
        "Date": format_datetime(datetime.now(UTC)),
        "Message-ID": options.get("message_id"),
        "In-Reply-To": options.get("in_reply_to"),
        "References": " ".join(options.get("references") or ()),
    }
    for name, value in fields.items():
        if value:
            message[name] = value
    message.set_content(body)
    if (html := options.get("html_body")) is not None:
        message.add_alternative(html, subtype="html")
    for attachment in options.get("attachments") or ():
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
    """Return the parts of a content type; `application/octet-stream` for types that cannot be attached."""
    part = EmailMessage()
    part["Content-Type"] = text
    header = part["Content-Type"]
    if header.defects or header.maintype in ("multipart", "message"):
        return "application", "octet-stream", {}
    return header.maintype, header.subtype, dict(header.params)
