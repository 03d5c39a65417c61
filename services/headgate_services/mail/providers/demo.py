"""A provider that delivers nothing: every e-mail goes to an outbox that the API shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import uuid4

from headgate.clock import Clock
from headgate_services.mail.providers.base import OutgoingAttachment
from headgate_services.mail.storage.database import Database
from headgate_services.mail.storage.models import DemoOutboxEntry
from headgate_services.mail.storage.times import utc


@dataclass(frozen=True, slots=True)
class DemoProvider:
    """Keeps every e-mail in the database, so that all workers show one outbox."""

    database: Database
    clock: Clock
    name: str = "demo"

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
        """Put one e-mail into the outbox, and return a made-up id."""
        entry = DemoOutboxEntry(
            id=f"demo-{uuid4()}",
            sent_at=utc(self.clock),
            from_address=from_address,
            to_addresses=[*to, *(cc or ()), *(bcc or ())],
            subject=subject,
            body=body,
            message_id=message_id,
            in_reply_to=in_reply_to,
            reference_ids=list(references or ()),
            attachment_names=[attachment.filename for attachment in attachments or ()],
        )
        async with self.database.writing() as session:
            session.add(entry)
        return entry.id
