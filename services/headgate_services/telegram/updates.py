"""What Telegram sends: the part of an update that the bot reads. Unknown fields pass.

https://core.telegram.org/bots/api#update
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class _Part(BaseModel):
    # Strict: a number in quotes is not what Telegram sends, so it is not taken for a number.
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class TelegramUser(_Part):
    """Somebody who writes or presses."""

    id: int
    first_name: str
    last_name: str | None = None
    username: str | None = None


class Chat(_Part):
    """Where it was written."""

    id: int
    type: str


class SentMessage(_Part):
    """A message, as Telegram describes it."""

    message_id: int
    sender: TelegramUser | None = Field(None, alias="from")
    chat: Chat
    message_thread_id: int | None = None
    text: str | None = None
    caption: str | None = None
    photo: list[Any] | None = None
    document: dict[str, Any] | None = None


class CallbackQuery(_Part):
    """A button pressed under a message."""

    id: str
    sender: TelegramUser = Field(alias="from")
    message: SentMessage | None = None
    data: str | None = None


class Update(_Part):
    """Something that happened; edits, channel posts and the like have neither of the two."""

    update_id: int
    message: SentMessage | None = None
    callback_query: CallbackQuery | None = None


def read_update(document: bytes | dict[str, Any]) -> Update | None:
    """Return the update of a request's body, or of a document; `None` if it is not JSON or not of an update's shape."""
    try:
        if isinstance(document, bytes):
            return Update.model_validate_json(document)
        return Update.model_validate(document)
    except ValidationError:
        return None
