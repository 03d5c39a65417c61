"""The tables that `migrations/` creates; a test compares the two."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, LargeBinary, Text, func
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from headgate_services.mail.storage.times import UtcTime

PREVIEW_LENGTH = 100

Direction = Literal["inbound", "outbound"]
Status = Literal["sent", "failed", "pending", "received"]


class Base(DeclarativeBase):
    """Base class; text columns are TEXT and times are in UTC on every database."""

    type_annotation_map = {  # noqa: RUF012  # SQLAlchemy's own convention
        str: Text(),
        bytes: LargeBinary(),
        datetime: UtcTime(),
        list[str]: JSON(),
        dict[str, Any]: JSON(),
        Direction: Text(),
        Status: Text(),
    }


class Inbox(Base):
    """An address that sends and receives mail."""

    __tablename__ = "inboxes"

    id: Mapped[str] = mapped_column(primary_key=True)
    email_address: Mapped[str]
    name: Mapped[str]
    provider_config: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]


Index("inboxes_email_address", func.lower(Inbox.email_address), unique=True)


class Thread(Base):
    """A thread of an inbox."""

    __tablename__ = "threads"
    __table_args__ = (Index("threads_inbox", "inbox_id", "last_message_at"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    inbox_id: Mapped[str] = mapped_column(ForeignKey("inboxes.id", ondelete="CASCADE"))
    subject: Mapped[str]
    summary: Mapped[str | None]
    last_message_at: Mapped[datetime]
    participant_hash: Mapped[str]
    created_at: Mapped[datetime]


class StoredMessage(Base):
    """An e-mail that was sent, failed, or was received.

    Attributes:
        message_id: The Message-ID header, with angle brackets.
        reference_ids: The Message-IDs of the earlier messages of the thread, oldest first.
    """

    __tablename__ = "messages"
    __table_args__ = (
        Index("messages_thread", "thread_id", "timestamp"),
        Index("messages_inbox", "inbox_id", "timestamp"),
        Index("messages_message_id", "inbox_id", "message_id"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    thread_id: Mapped[str] = mapped_column(ForeignKey("threads.id", ondelete="CASCADE"))
    inbox_id: Mapped[str] = mapped_column(ForeignKey("inboxes.id", ondelete="CASCADE"))
    direction: Mapped[Direction]
    status: Mapped[Status]
    error: Mapped[str | None]
    provider_message_id: Mapped[str | None]
    message_id: Mapped[str]
    in_reply_to: Mapped[str | None]
    reference_ids: Mapped[list[str]]
    subject: Mapped[str]
    from_address: Mapped[str]
    to_addresses: Mapped[list[str]]
    cc_addresses: Mapped[list[str]]
    bcc_addresses: Mapped[list[str]]
    reply_to_addresses: Mapped[list[str]]
    text: Mapped[str]
    html: Mapped[str | None]
    labels: Mapped[list[str]]
    size: Mapped[int] = mapped_column(BigInteger)
    timestamp: Mapped[datetime]
    created_at: Mapped[datetime]

    @property
    def preview(self) -> str:
        """The beginning of the text on one line."""
        return " ".join(self.text.split())[:PREVIEW_LENGTH]

    @property
    def role(self) -> str:
        """The role of the sender in a conversation."""
        return "assistant" if self.direction == "outbound" else "user"

    @property
    def delivery(self) -> dict[str, Any]:
        """The outcome of the send."""
        return {"status": self.status, "error": self.error, "message_id": self.message_id}


class Attachment(Base):
    """An attachment of a message."""

    __tablename__ = "attachments"
    __table_args__ = (Index("attachments_message", "message_id"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    message_id: Mapped[str] = mapped_column(ForeignKey("messages.id", ondelete="CASCADE"))
    filename: Mapped[str]
    content_type: Mapped[str]
    disposition: Mapped[str]
    content_id: Mapped[str | None]
    size: Mapped[int] = mapped_column(BigInteger)
    content: Mapped[bytes] = mapped_column(deferred=True)


class DemoOutboxEntry(Base):
    """An e-mail in the outbox of the demo provider."""

    __tablename__ = "demo_outbox"
    __table_args__ = (Index("demo_outbox_sent_at", "sent_at"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    sent_at: Mapped[datetime]
    from_address: Mapped[str]
    to_addresses: Mapped[list[str]]
    subject: Mapped[str]
    body: Mapped[str]
    message_id: Mapped[str | None]
    in_reply_to: Mapped[str | None]
    reference_ids: Mapped[list[str]]
    attachment_names: Mapped[list[str]]


class IdempotencyKey(Base):
    """A request with an idempotency key.

    Attributes:
        fingerprint: A digest of the request.
        response: The response; `None` while the request is in progress.
    """

    __tablename__ = "idempotency_keys"
    __table_args__ = (Index("idempotency_keys_created_at", "created_at"),)

    key: Mapped[str] = mapped_column(primary_key=True)
    fingerprint: Mapped[str]
    response: Mapped[dict[str, Any] | None]
    created_at: Mapped[datetime]
