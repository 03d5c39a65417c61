"""The fields of Telegram's updates that the bot reads; other fields are ignored.

https://core.telegram.org/bots/api#update
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class _Part(BaseModel):
    # Strict: Telegram never sends numbers as strings.
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class TelegramUser(_Part):
    """The sender of a message, or the user who pressed a button."""

    id: int
    first_name: str
    last_name: str | None = None
    username: str | None = None


class Chat(_Part):
    """The chat of a message."""

    id: int
    type: str


class SentMessage(_Part):
    """A message in Telegram's format."""

    message_id: int
    sender: TelegramUser | None = Field(None, alias="from")
    chat: Chat
    message_thread_id: int | None = None
    text: str | None = None
    caption: str | None = None
    photo: list[Any] | None = None
    document: dict[str, Any] | None = None


class CallbackQuery(_Part):
    """A press of a button below a message."""

    id: str
    sender: TelegramUser = Field(alias="from")
    message: SentMessage | None = None
    data: str | None = None


class Update(_Part):
    """An update. Edits, channel posts and other kinds have neither a message nor a query."""

    update_id: int
    message: SentMessage | None = None
    callback_query: CallbackQuery | None = None


def read_update(document: bytes | dict[str, Any]) -> Update | None:
    """Parse an update from a request body or a document; `None` if it is invalid."""
    try:
        if isinstance(document, bytes):
            return Update.model_validate_json(document)
        return Update.model_validate(document)
    except ValidationError:
        return None
