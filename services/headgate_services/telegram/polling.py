"""Long polling, for development without a public address.

An update that could not be dispatched is fetched again, just as Telegram delivers it again to a webhook.
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
    """Fetches and processes updates, one after the other.

    Args:
        bot: The client of the Bot API.
        webhook: The webhook that processes updates.
        clock: The clock for pauses.
    """

    def __init__(self, bot: BotApi, webhook: Webhook, clock: Clock) -> None:
        self._bot = bot
        self._webhook = webhook
        self._clock = clock
        self._offset: int | None = None

    async def run(self) -> None:
        """Run until cancelled, with growing pauses after failures.

        Raises:
            BotApiError: The token is wrong, or a webhook is set.
        """
        pause = FIRST_PAUSE
        while True:
            if await self._round():
                pause = FIRST_PAUSE
            else:
                await self._clock.asleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    async def _round(self) -> bool:
        """Fetch and process updates once; return whether all succeeded."""
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
            return True  # another kind of update; fetching it again would not help
        try:
            await self._webhook.receive(update)
        except Exception:  # handlers may raise anything
            _logger.exception("update %s could not be dispatched; it is fetched again", update.update_id)
            return False
        return True
