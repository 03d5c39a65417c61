"""Queries on the tables."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from headgate_services.mail.storage.models import Attachment, DemoOutboxEntry, Inbox, StoredMessage, Thread


async def list_inboxes(session: AsyncSession, limit: int, offset: int) -> Sequence[Inbox]:
    """Return inboxes, oldest first."""
    query = select(Inbox).order_by(Inbox.created_at, Inbox.id).limit(limit).offset(offset)
    return (await session.scalars(query)).all()


async def inbox_of_address(session: AsyncSession, address: str) -> Inbox | None:
    """Return the inbox of an address; case does not matter."""
    return await session.scalar(select(Inbox).where(func.lower(Inbox.email_address) == address.lower()))


async def list_threads(session: AsyncSession, inbox_id: str, limit: int, offset: int) -> Sequence[Thread]:
    """Return the threads of an inbox, ordered by their newest message."""
    query = select(Thread).where(Thread.inbox_id == inbox_id)
    query = query.order_by(Thread.last_message_at.desc(), Thread.id).limit(limit).offset(offset)
    return (await session.scalars(query)).all()


async def messages_of_thread(session: AsyncSession, thread_id: str) -> Sequence[StoredMessage]:
    """Return the messages of a thread, oldest first; a sent message comes before its received copy."""
    query = select(StoredMessage).where(StoredMessage.thread_id == thread_id)
    query = query.order_by(StoredMessage.timestamp, StoredMessage.direction.desc(), StoredMessage.id)
    return (await session.scalars(query)).all()


async def search_messages(
    session: AsyncSession,
    *,
    inbox_id: str | None,
    thread_id: str | None,
    text: str | None,
    limit: int,
    offset: int,
) -> tuple[Sequence[StoredMessage], int]:
    """Return a page of messages, newest first, and the total number.

    `text` searches the subject, the text and the sender; case does not matter.
    """
    query = select(StoredMessage)
    if inbox_id is not None:
        query = query.where(StoredMessage.inbox_id == inbox_id)
    if thread_id is not None:
        query = query.where(StoredMessage.thread_id == thread_id)
    if text:
        places = (StoredMessage.subject, StoredMessage.text, StoredMessage.from_address)
        query = query.where(or_(*(place.icontains(text, autoescape=True) for place in places)))
    total = await session.scalar(select(func.count()).select_from(query.subquery()))
    page = query.order_by(StoredMessage.timestamp.desc(), StoredMessage.id).limit(limit).offset(offset)
    return (await session.scalars(page)).all(), total or 0


async def newest_delivered(session: AsyncSession, thread_id: str) -> StoredMessage | None:
    """Return the newest delivered message of a thread, which a reply refers to."""
    query = select(StoredMessage).where(
        StoredMessage.thread_id == thread_id, StoredMessage.status != "failed"
    )
    return await session.scalar(query.order_by(StoredMessage.timestamp.desc(), StoredMessage.id).limit(1))


async def thread_with(session: AsyncSession, inbox_id: str, message_ids: Sequence[str]) -> Thread | None:
    """Return the thread of an inbox that contains one of these Message-IDs."""
    query = (
        select(Thread)
        .join(StoredMessage, StoredMessage.thread_id == Thread.id)
        .where(StoredMessage.inbox_id == inbox_id, StoredMessage.message_id.in_(message_ids))
        .order_by(StoredMessage.timestamp.desc())
        .limit(1)
    )
    return await session.scalar(query)


async def attachments_of(session: AsyncSession, message_id: str) -> Sequence[Attachment]:
    """Return the attachments of a message."""
    query = select(Attachment).where(Attachment.message_id == message_id).order_by(Attachment.id)
    return (await session.scalars(query)).all()


async def demo_outbox(
    session: AsyncSession, limit: int, offset: int
) -> tuple[Sequence[DemoOutboxEntry], int]:
    """Return a page of the demo outbox, newest first, and the total number."""
    total = await session.scalar(select(func.count()).select_from(DemoOutboxEntry))
    query = select(DemoOutboxEntry).order_by(DemoOutboxEntry.sent_at.desc(), DemoOutboxEntry.id)
    return (await session.scalars(query.limit(limit).offset(offset))).all(), total or 0
