"""Long polling, files, and what Telegram asks to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headgate.testing import FakeClock
from headgate_services.telegram import File
from headgate_services.telegram.bot_api import BotApi, BotApiError
from headgate_services.telegram.polling import UpdatePoller
from tests.apps.telegram.bot_api_server import Bot, BotApiServer
from tests.apps.telegram.conftest import Start
from tests.apps.telegram.updates import message, photo_update, text_update, update


class Collecting:
    """Stores the ids of updates, after a number of failures."""

    def __init__(self, failures: int = 0) -> None:
        self.seen: list[int] = []
        self.failures = failures

    async def receive(self, received: Any) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("not now")
        self.seen.append(received.update_id)


@pytest.fixture
def api(bot_api: tuple[BotApiServer, str], token: str, clock: FakeClock) -> BotApi:
    return BotApi(token, api_base=bot_api[1], clock=clock)


@asynccontextmanager
async def polling(api: BotApi, bot: Bot, clock: FakeClock, webhook: Any) -> AsyncIterator[None]:
    """Poll for updates during the block; in the end Telegram refuses, which ends it."""
    running = asyncio.create_task(UpdatePoller(api, webhook, clock).run())
    async with asyncio.timeout(30):
        yield
        bot.fail("getUpdates", 409, "Conflict: can't use getUpdates method while webhook is active")
        with pytest.raises(BotApiError, match="webhook is active"):
            await running
    await api.aclose()


async def dispatch(bot: Bot, webhook: Collecting, clock: FakeClock, count: int) -> list[int]:
    """Wait until new updates were dispatched, and return their ids."""
    new = [text_update() for _ in range(count)]
    bot.updates += new
    while new[-1]["update_id"] not in webhook.seen:
        clock.advance(1)
        await asyncio.sleep(0)
    return [each["update_id"] for each in new]


async def test_updates_are_fetched_in_order_and_once(api: BotApi, bot: Bot, clock: FakeClock) -> None:
    webhook = Collecting()
    async with polling(api, bot, clock, webhook):
        expected = await dispatch(bot, webhook, clock, 2)
        expected += await dispatch(bot, webhook, clock, 1)
    assert webhook.seen == expected
    assert bot.calls[-1][1]["offset"] == expected[-1] + 1  # confirms all of them
    assert bot.calls[0][1]["allowed_updates"] == ["message", "callback_query"]


async def test_polling_goes_on_after_failures_with_the_update_that_failed(
    api: BotApi, bot: Bot, clock: FakeClock
) -> None:
    webhook = Collecting(failures=1)
    bot.fail("getUpdates", 502, "Bad Gateway")
    async with polling(api, bot, clock, webhook):
        expected = await dispatch(bot, webhook, clock, 2)
    assert webhook.seen == expected


async def test_a_wait_that_is_too_long_is_an_error(api: BotApi, bot: Bot) -> None:
    bot.fail("sendMessage", 429, "Too Many Requests: retry after 900", retry_after=900)
    with pytest.raises(BotApiError) as refused:
        await api.send_message("42", "Hello")
    assert refused.value.retry_after == 900
    await api.aclose()


async def test_pictures_and_documents_reach_the_handler_as_ids(start: Start) -> None:
    service = await start()
    await service.post(photo_update("Look"))
    document = {"file_id": "BQAC", "file_name": "a.pdf", "mime_type": "application/pdf", "file_size": 7}
    await service.post(update(message=message(text=None, caption="Read", document=document)))
    await service.post(update(message=message(text=None, caption="Odd", document={}, photo=["x"])))
    photo, read, odd = service.handler.events
    assert [file.kind for file in photo.files] == ["photo"]
    assert photo.files[0].file_id == "AgACAgIAAxkBAAJ"
    assert read.files == (File("document", "BQAC", "a.pdf", "application/pdf"),)
    assert odd.files == ()
