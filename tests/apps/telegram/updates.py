"""Updates as Telegram sends them: https://core.telegram.org/bots/api#update"""

from __future__ import annotations

from itertools import count
from typing import Any

DATE = 1_700_000_000
USER = 42
FORUM = -1001234567890

_update_ids = count(910_000_001)


def sender(user_id: int) -> dict[str, Any]:
    return {"id": user_id, "is_bot": False, "first_name": "Ada", "username": f"user{user_id}"}


def private_chat(user_id: int) -> dict[str, Any]:
    return {"id": user_id, "first_name": "Ada", "type": "private"}


def forum() -> dict[str, Any]:
    return {"id": FORUM, "title": "The lab", "is_forum": True, "type": "supergroup"}


def update(**content: Any) -> dict[str, Any]:
    """Return an update with a new id."""
    return {"update_id": next(_update_ids)} | content


def message(user_id: int = USER, text: str | None = "Hello", **more: Any) -> dict[str, Any]:
    """Return a private message with some fields replaced."""
    sent = {"message_id": 1365, "from": sender(user_id), "chat": private_chat(user_id), "date": DATE}
    return sent | ({} if text is None else {"text": text}) | more


def text_update(user_id: int = USER, text: str = "Hello", **more: Any) -> dict[str, Any]:
    return update(message=message(user_id, text, **more))


def photo_update(caption: str | None, user_id: int = USER) -> dict[str, Any]:
    photo = [{"file_id": "AgACAgIAAxkBAAI", "width": 90}, {"file_id": "AgACAgIAAxkBAAJ", "width": 1280}]
    return update(message=message(user_id, None, photo=photo, **({"caption": caption} if caption else {})))


def topic_update(thread: int, user_id: int = USER, text: str = "Hello") -> dict[str, Any]:
    return text_update(user_id, text, chat=forum(), message_thread_id=thread, is_topic_message=True)


def edit_update(user_id: int = USER) -> dict[str, Any]:
    return update(edited_message=message(user_id, "Hello, again", edit_date=DATE + 5))


def channel_post_update() -> dict[str, Any]:
    chat = {"id": -1009876543210, "title": "News", "username": "news", "type": "channel"}
    return update(
        channel_post={"message_id": 7, "sender_chat": chat, "chat": chat, "date": DATE, "text": "News"}
    )


def button_update(user_id: int = USER, data: str | None = "approve:7", **more: Any) -> dict[str, Any]:
    under = message(user_id, "Shall I?", **{"from": sender(777) | {"is_bot": True}})
    query = {"id": "4382bfdwdsb323b2d9", "from": sender(user_id), "message": under, "chat_instance": "-38"}
    return update(callback_query=query | ({} if data is None else {"data": data}), **more)


def joined_update() -> dict[str, Any]:
    """Return a service message: somebody was added to a group."""
    return update(message=message(USER, None, chat=forum(), new_chat_members=[sender(43)]))


def anonymous_update() -> dict[str, Any]:
    """Return a message on behalf of a chat: nobody's."""
    sent = message(USER, "As the group", chat=forum(), sender_chat=forum())
    del sent["from"]
    return update(message=sent)
