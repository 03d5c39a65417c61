"""Long polling: updates are fetched instead of delivered, for development without a public address.

An update that could not be dispatched is fetched again, as Telegram would deliver it again to a webhook.
"""

from __future__ import annotations

import logging

from headgate.clock import Clock
from headgate_services.telegram.bot_api import BotApi, BotApiError
from headgate_services.telegram.updates import Update, read_update
from headgate_services.telegram.webhook import Webhook

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0

_logger = logging.getLogger(__name__)


class UpdatePoller:
    """Fetches updates and has them dealt with, one after the other.

    Args:
        bot: Where they are fetched.
        webhook: What deals with them, exactly as with those that are delivered.
        clock: What pauses are made with.
    """

    def __init__(self, bot: BotApi, webhook: Webhook, clock: Clock) -> None:
        self._bot = bot
        self._webhook = webhook
        self._clock = clock
        self._offset: int | None = None

    async def run(self) -> None:
        """Go on until cancelled; a failure makes a pause, ever longer while it lasts.

        Raises:
            BotApiError: Telegram refuses for good: the token is wrong, or a webhook is set.
        """
        pause = FIRST_PAUSE
        while True:
            if await self._round():
                pause = FIRST_PAUSE
            else:
                await self._clock.asleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    async def _round(self) -> bool:
        """Fetch once; return whether all went well."""
        try:
            documents = await self._bot.get_updates(self._offset)
        except BotApiError as error:
            if error.code in (401, 404, 409):
                raise
            _logger.warning("updates could not be fetched: %s", error)
            return False
        for document in documents:
            if not await self._dispatch(read_update(document)):
                return False
            self._offset = int(document["update_id"]) + 1
        return True

    async def _dispatch(self, update: Update | None) -> bool:
        if update is None:
            return True  # not of a shape that we read, and never will be
        try:
            await self._webhook.receive(update)
        except Exception:  # whatever a handler raises
            _logger.exception("update %s could not be dispatched; it is fetched again", update.update_id)
            return False
        return True
