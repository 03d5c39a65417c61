"""Requests and responses of the API."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from headgate_services.common.text import Text
from headgate_services.common.views import RowView

_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def _one_line(text: str) -> str:
    if _CONTROL_CHARACTER.search(text):
        raise ValueError("must be one line without control characters")
    return text


Line = Annotated[Text, AfterValidator(_one_line)]


V = TypeVar("V", bound=RowView)


class RowList(BaseModel, Generic[V]):
    """A page of rows, and its length."""

    items: list[V]
    count: int

    @classmethod
    def of(cls, rows: Sequence[object], **more: int) -> Self:
        """Return the page of these rows."""
        return cls.model_validate({"items": rows, "count": len(rows), **more})


class SendAttachment(BaseModel):
    """An attachment to send."""

    model_config = ConfigDict(extra="forbid")

    filename: Annotated[Line, Field(min_length=1, max_length=255)]
    content_type: Annotated[Line, Field(min_length=1)]
    content_base64: str
    disposition: Literal["attachment", "inline"] = "attachment"
    content_id: Line | None = None


class SendRequest(BaseModel):
    """An e-mail to send. Unknown fields are ignored."""

    inbox_id: Text
    to: Annotated[list[Text], Field(min_length=1)]
    subject: Annotated[Text, Field(min_length=1)]
    body: Text = Field(description="Markdown; may be empty")
    html: Text | None = Field(default=None, description="the HTML part; by default made from the body")
    cc: list[Text] | None = Field(default=None, description="further recipients, visible to all")
    bcc: list[Text] | None = Field(default=None, description="hidden recipients")
    reply_to_thread_id: Text | None = None
    attachments: list[SendAttachment] | None = None

    @property
    def recipients(self) -> list[str]:
        """All recipients."""
        return [*self.to, *(self.cc or ()), *(self.bcc or ())]


class SendResponse(BaseModel):
    """The outcome of a send."""

    id: str
    thread_id: str
    provider_message_id: str | None
    status: Literal["sent", "failed", "pending"]
    error: str | None


class InboxCreate(BaseModel):
    """An inbox to create."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[Text, Field(min_length=1)]
    email_username: Annotated[Text, Field(min_length=1)]


class InboxView(RowView):
    """An inbox."""

    id: str
    email_address: str
    name: str
    provider_config: dict[str, Any]


class MessageView(RowView):
    """A stored message."""

    id: str
    thread_id: str
    inbox_id: str
    direction: Literal["inbound", "outbound"]
    provider_message_id: str | None
    subject: str
    from_address: str
    to_addresses: list[str]
    cc_addresses: list[str]
    bcc_addresses: list[str]
    reply_to_addresses: list[str]
    text: str
    html: str | None
    content_clean: str = Field(validation_alias="text")
    timestamp: datetime
    labels: list[str]
    preview: str
    size: int
    in_reply_to: str | None
    references: list[str] = Field(validation_alias="reference_ids")
    metadata: dict[str, Any] = Field(validation_alias="delivery")
    created_at: datetime


class MessageList(RowList[MessageView]):
    """A page of messages, and the total number."""

    total: int


class ThreadView(RowView):
    """A thread without its messages."""

    id: str
    inbox_id: str
    subject: str
    summary: str | None
    last_message_at: datetime
    participant_hash: str


class ThreadMessage(RowView):
    """A message as a turn in a conversation."""

    role: Literal["user", "assistant"]
    author: str = Field(validation_alias="from_address")
    content: str = Field(validation_alias="text")
    timestamp: datetime


class ThreadDetail(BaseModel):
    """A thread with its messages, oldest first."""

    id: str
    subject: str
    summary: str | None
    messages: list[ThreadMessage]


class AttachmentView(RowView):
    """A stored attachment, without its content."""

    id: str
    message_id: str
    filename: str
    content_type: str
    disposition: str
    content_id: str | None
    size: int


class OutboxEntryView(RowView):
    """An e-mail in the outbox of the demo provider."""

    id: str
    sent_at: datetime
    from_address: str
    to_addresses: list[str]
    subject: str
    body: str
    message_id: str | None
    in_reply_to: str | None
    references: list[str] = Field(validation_alias="reference_ids")
    attachments: list[str] = Field(validation_alias="attachment_names")


class OutboxList(RowList[OutboxEntryView]):
    """A page of the demo outbox, and the total number."""

    total: int


class WindowView(RowView):
    """A window of the send limit; `limit` and `remaining` are null if it is unlimited."""

    name: str
    limit: int | None
    count: int
    remaining: int | None
    retry_after: int | None


class RateLimitView(RowView):
    """Whether one more e-mail may be sent now; `windows` is empty without limits."""

    allowed: bool
    retry_after: int | None
    windows: list[WindowView]
