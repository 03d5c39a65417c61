"""Storing messages in the threads that they belong to."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from hashlib import sha256
from uuid import uuid4

from sqlalchemy.ext.asyncio import AsyncSession

from headgate_services.mail.domain_filter import DomainFilter, bare_address
from headgate_services.mail.providers import OutgoingAttachment
from headgate_services.mail.storage.models import Attachment, StoredMessage, Thread
from headgate_services.mail.storage.queries import inbox_of_address, thread_with

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Envelope:
    """An e-mail as sender and recipients both see it."""

    message_id: str
    in_reply_to: str | None
    references: list[str]
    from_address: str
    to_addresses: list[str]
    subject: str
    text: str
    attachments: Sequence[OutgoingAttachment] = ()
    cc_addresses: list[str] = field(default_factory=list)
    bcc_addresses: list[str] = field(default_factory=list)
    html: str | None = None

    @property
    def recipients(self) -> list[str]:
        """The address of every recipient, without names, each once."""
        everyone = [*self.to_addresses, *self.cc_addresses, *self.bcc_addresses]
        return list(dict.fromkeys(bare_address(address).lower() for address in everyone))


async def add_message(
    session: AsyncSession,
    message: StoredMessage,
    envelope: Envelope,
    inbox_id: str,
    thread_id: str | None,
    now: datetime,
) -> Thread:
    """Store a message and its files in a thread of an inbox, and return the thread: a new one if none is given.

    The message comes with its id, direction and status; everything else is filled in from the envelope.
    """
    thread = await session.get(Thread, thread_id) if thread_id else None
    if thread is None:  # also if it was deleted while the e-mail was being sent
        thread = Thread(
            id=str(uuid4()),
            inbox_id=inbox_id,
            subject=envelope.subject,
            last_message_at=now,
            participant_hash=_participant_hash([envelope.from_address, *envelope.to_addresses]),
            created_at=now,
        )
        session.add(thread)
    thread.last_message_at = max(thread.last_message_at, now)
    await session.flush()  # the thread's row before those that refer to it
    message.inbox_id = inbox_id
    message.thread_id = thread.id
    message.timestamp = message.created_at = now
    _fill_in(message, envelope)
    session.add(message)
    await session.flush()
    session.add_all(_attachment(message.id, file) for file in envelope.attachments)
    return thread


async def loop_back(session: AsyncSession, envelope: Envelope, inbound: DomainFilter, now: datetime) -> None:
    """Deliver a copy to every recipient whose inbox is one of ours: the only inbound mail of the demo."""
    copy = replace(envelope, bcc_addresses=[])  # hidden from recipients
    for recipient in envelope.recipients:
        inbox = await inbox_of_address(session, recipient)
        if inbox is None:
            continue
        if not inbound.allows(envelope.from_address):
            logger.info("Copy for %s not stored: domain_blocked", recipient)
            continue
        thread = await thread_with(session, inbox.id, [*envelope.references, envelope.message_id])
        message = StoredMessage(id=str(uuid4()), direction="inbound", status="received")
        await add_message(session, message, copy, inbox.id, thread.id if thread else None, now)


def _fill_in(message: StoredMessage, envelope: Envelope) -> None:
    message.message_id = envelope.message_id
    message.in_reply_to = envelope.in_reply_to
    message.reference_ids = envelope.references
    message.subject = envelope.subject
    message.from_address = envelope.from_address
    message.to_addresses = envelope.to_addresses
    message.cc_addresses = envelope.cc_addresses
    message.bcc_addresses = envelope.bcc_addresses
    message.reply_to_addresses = []
    message.text = envelope.text
    message.html = envelope.html
    message.labels = []
    message.size = len(envelope.text.encode()) + sum(len(file.content) for file in envelope.attachments)


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
    """Return a digest that is the same for the same people, whatever the order and the case they are written in."""
    return sha256("\n".join(sorted({address.lower() for address in addresses})).encode()).hexdigest()
