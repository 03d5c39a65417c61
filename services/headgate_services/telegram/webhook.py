"""Processing of updates; `app` has the HTTP part.

The order matters: only messages of allowed users are counted, only counted messages are dispatched, and an update that was
dispatched or refused is ignored if it is delivered again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from headgate import AsyncHold, AsyncLimiter
from headgate_services.telegram.bot_api import BotApi, BotApiError
from headgate_services.telegram.dispatch import ButtonPress, File, Handler, Message
from headgate_services.telegram.seen import SeenUpdates
from headgate_services.telegram.updates import CallbackQuery, SentMessage, Update

REFUSAL = "You've reached the message limit. Please try again later."

OUTCOMES = ("dispatched", "refused", "repeated", "failed")

_logger = logging.getLogger(__name__)


class Webhook:
    """Processes updates.

    Args:
        allowed_user_ids: The users who may use the bot.
        limiter: The limit of messages per user.
        bot: The client of the Bot API, for replies.
        handler: The handler of messages.
        replies: The limit of replies to refused messages per user; `None` for unlimited.
        seen: The updates that were dispatched or refused.
        count: Called with the outcome of each update of an allowed user: one of `OUTCOMES`.
    """

    def __init__(
        self,
        allowed_user_ids: frozenset[str],
        limiter: AsyncLimiter,
        bot: BotApi,
        handler: Handler,
        replies: AsyncLimiter | None,
        seen: SeenUpdates,
        count: Callable[[str], None],
    ) -> None:
        self._allowed = allowed_user_ids
        self._limiter = limiter
        self._bot = bot
        self._handler = handler
        self._replies = replies
        self._seen = seen
        self._count = count

    async def receive(self, update: Update) -> None:
        """Process an update; most kinds are ignored.

        Errors of the handler of a message are raised after the message's unit was given back.
        """
        if update.callback_query is not None:
            await self._on_button(_button_press(update.update_id, update.callback_query))
        elif (
            update.message is not None and (message := _message(update.update_id, update.message)) is not None
        ):
            await self._on_message(message)

    async def _on_message(self, message: Message) -> None:
        if message.user_id not in self._allowed:
            return
        async with self._seen.turn(message.update_id) as is_new:
            if not is_new:
                self._count("repeated")
                return
            hold = await self._take(message.user_id)
            if hold is not None and not hold.allowed:
                self._count("refused")
                await self._seen.add(message.update_id)
                await self._refuse(message)
                return
            reply = await self._dispatch(message, hold)
            await self._seen.add(message.update_id)
            self._count("dispatched")
        if reply:
            await self._say(message, reply)

    async def _take(self, user_id: str) -> AsyncHold | None:
        """Hold a unit; return `None` if the limiter fails, which admits the message."""
        try:
            hold = await self._limiter.hold(user_id)
            if hold.decision.degraded:
                _logger.error("the limit of user %s could not be checked; the message is admitted", user_id)
            return hold
        except Exception:  # custom stores may raise anything, and the bot fails open (TX-5)
            _logger.exception("the limit of user %s could not be checked; the message is admitted", user_id)
            return None

    async def _dispatch(self, message: Message, hold: AsyncHold | None) -> str | None:
        try:
            return await self._handler(message)
        except BaseException:  # also when the server stops: the message was not dispatched
            self._count("failed")
            if hold is not None:
                await self._give_back(message.user_id, hold)
            raise

    async def _give_back(self, user_id: str, hold: AsyncHold) -> None:
        try:
            await hold.release()
        except Exception:  # custom stores may raise anything; the caller raises the handler's error
            _logger.exception("a unit of user %s could not be given back; it stays counted", user_id)

    async def _refuse(self, message: Message) -> None:
        _logger.info("user %s has reached the message limit", message.user_id)
        if self._replies is None or await self._replies.hit(message.user_id):
            await self._say(message, REFUSAL)

    async def _say(self, message: Message, text: str) -> None:
        """Reply to the same chat and topic; a failure is only logged."""
        try:
            await self._bot.send_message(message.chat_id, text, message.message_thread_id)
        except BotApiError:
            _logger.exception("the reply to chat %s could not be sent", message.chat_id)

    async def _on_button(self, press: ButtonPress) -> None:
        if press.user_id not in self._allowed:
            return
        try:
            async with self._seen.turn(press.update_id) as is_new:
                if not is_new:
                    self._count("repeated")
                    return
                text = await self._handler(press)
                await self._seen.add(press.update_id)
            self._count("dispatched")
            await self._bot.answer_callback_query(press.query_id, text)
        except Exception:  # not raised, because Telegram would deliver the press again and again
            self._count("failed")
            _logger.exception("a button pressed by user %s could not be handled", press.user_id)


def _message(update_id: int, sent: SentMessage) -> Message | None:
    """Return the message of an update; `None` without a sender or without text."""
    text = sent.text or sent.caption
    if sent.sender is None or not text:
        return None
    return Message(
        update_id,
        sent.message_id,
        str(sent.sender.id),
        str(sent.chat.id),
        text,
        sent.message_thread_id,
        tuple(_files(sent)),
    )


def _files(sent: SentMessage) -> Iterator[File]:
    # `photo` has the sizes of one picture, the largest last.
    for kind, found in (("photo", sent.photo[-1] if sent.photo else None), ("document", sent.document)):
        if isinstance(found, dict) and isinstance(found.get("file_id"), str):
            yield File(kind, found["file_id"], found.get("file_name"), found.get("mime_type"))


def _button_press(update_id: int, query: CallbackQuery) -> ButtonPress:
    under = query.message
    return ButtonPress(
        update_id,
        query.id,
        str(query.sender.id),
        query.data,
        None if under is None else str(under.chat.id),
        None if under is None else under.message_thread_id,
    )
