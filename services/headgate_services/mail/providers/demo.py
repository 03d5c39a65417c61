"""A provider that delivers nothing: e-mails are stored in an outbox that the API returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack
from uuid import uuid4

from headgate.clock import Clock
from headgate_services.mail.providers.base import MailOptions
from headgate_services.mail.storage.database import MailDatabase
from headgate_services.mail.storage.models import DemoOutboxEntry
from headgate_services.mail.storage.times import utc


@dataclass(frozen=True, slots=True)
class DemoProvider:
    """Stores every e-mail in the database, so that all workers have the same outbox."""

    database: MailDatabase
    clock: Clock
    name: str = "demo"

    async def send_email(
        self, to: Sequence[str], subject: str, body: str, **options: Unpack[MailOptions]
    ) -> str | None:
        """Store one e-mail in the outbox, and return a generated id."""
        entry = DemoOutboxEntry(
            id=f"demo-{uuid4()}",
            sent_at=utc(self.clock),
            from_address=options["from_address"],
            to_addresses=[*to, *(options.get("cc") or ()), *(options.get("bcc") or ())],
            subject=subject,
            body=body,
            message_id=options.get("message_id"),
            in_reply_to=options.get("in_reply_to"),
            reference_ids=list(options.get("references") or ()),
            attachment_names=[attachment.filename for attachment in options.get("attachments") or ()],
        )
        async with self.database.writing() as session:
            session.add(entry)
        return entry.id
