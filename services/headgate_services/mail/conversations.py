"""Storage of messages in threads."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Any
from uuid import uuid4

from sqlalchemy.ext.asyncio import AsyncSession

from headgate_services.mail.domain_filter import DomainFilter, bare_address, domain_of
from headgate_services.mail.providers import OutgoingAttachment
from headgate_services.mail.schemas import SendRequest
from headgate_services.mail.storage.models import Attachment, Inbox, StoredMessage, Thread
from headgate_services.mail.storage.queries import inbox_of_address, thread_with

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MailDraft:
    """An e-mail that is ready for the provider.

    Attributes:
        thread: The thread that it replies to, or None for a new thread.
    """

    id: str
    request: SendRequest
    inbox: Inbox
    thread: Thread | None
    attachments: list[OutgoingAttachment]
    in_reply_to: str | None
    references: list[str]
    html: str | None

    @property
    def message_id(self) -> str:
        """The Message-ID header."""
        return f"<{self.id}@{domain_of(self.inbox.email_address)}>"


async def add_message(
    session: AsyncSession,
    draft: MailDraft,
    inbox_id: str,
    thread_id: str | None,
    now: datetime,
    **delivery: Any,
) -> Thread:
    """Store a message and its attachments in a thread of an inbox, and return the thread.

    Args:
        session: A session that writes.
        draft: The e-mail.
        inbox_id: The inbox of the sender, or of a recipient.
        thread_id: The thread; None for a new one.
        now: The time of the message.
        delivery: The columns that differ between sender and recipient: id, direction, status, `bcc_addresses`, …
    """
    request = draft.request
    thread = await session.get(Thread, thread_id) if thread_id else None
    if thread is None:  # also if it was deleted during the send
        thread = Thread(
            id=str(uuid4()),
            inbox_id=inbox_id,
            subject=request.subject,
            last_message_at=now,
            participant_hash=_participant_hash([draft.inbox.email_address, *request.to]),
            created_at=now,
        )
        session.add(thread)
    thread.last_message_at = max(thread.last_message_at, now)
    await session.flush()  # the rows below refer to the thread
    message = StoredMessage(
        inbox_id=inbox_id,
        thread_id=thread.id,
        message_id=draft.message_id,
        in_reply_to=draft.in_reply_to,
        reference_ids=draft.references,
        subject=request.subject,
        from_address=draft.inbox.email_address,
        to_addresses=request.to,
        cc_addresses=request.cc or [],
        reply_to_addresses=[],
        text=request.body,
        html=draft.html,
        labels=[],
        size=len(request.body.encode()) + sum(len(file.content) for file in draft.attachments),
        timestamp=now,
        created_at=now,
        **delivery,
    )
    session.add(message)
    await session.flush()
    session.add_all(_attachment(message.id, file) for file in draft.attachments)
    return thread


async def loop_back(session: AsyncSession, draft: MailDraft, inbound: DomainFilter, now: datetime) -> None:
    """Deliver a copy to every recipient that has an inbox here; the demo provider's only inbound mail."""
    recipients = dict.fromkeys(bare_address(address).lower() for address in draft.request.recipients)
    for recipient in recipients:
        inbox = await inbox_of_address(session, recipient)
        if inbox is None:
            continue
        if not inbound.allows(draft.inbox.email_address):
            logger.info("Copy for %s not stored: domain_blocked", recipient)
            continue
        thread = await thread_with(session, inbox.id, [*draft.references, draft.message_id])
        await add_message(
            session,
            draft,
            inbox.id,
            thread.id if thread else None,
            now,
            id=str(uuid4()),
            direction="inbound",
            status="received",
            bcc_addresses=[],  # hidden from recipients
        )


def _attachment(message_id: str, file: OutgoingAttachment) -> Attachment:
    return Attachment(
        id=str(uuid4()),
        message_id=message_id,
        filename=file.filename,
        content_type=file.content_type,
        disposition=file.disposition,
        content_id=file.content_id,
        size=len(file.content),
        content=file.content,
    )


def _participant_hash(addresses: Iterable[str]) -> str:
    """Return a digest of a set of addresses; order and case do not matter."""
    return sha256("\n".join(sorted({address.lower() for address in addresses})).encode()).hexdigest()
