"""Our client of the Bot API, and a witness: python-telegram-bot finds the stand-in to be what Telegram is."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import telegram
from telegram.request import HTTPXRequest

from headgate_services.telegram.bot_api import BotApi, BotApiError
from tests.apps.telegram import updates
from tests.apps.telegram.bot_api_server import Bot, BotApiServer


@pytest.fixture
async def witness(bot_api: tuple[BotApiServer, str], token: str) -> AsyncIterator[telegram.Bot]:
    async with telegram.Bot(token, base_url=f"{bot_api[1]}/bot", request=HTTPXRequest()) as bot:
        yield bot


@pytest.fixture
async def api(bot_api: tuple[BotApiServer, str], token: str) -> AsyncIterator[BotApi]:
    api = BotApi(token, api_base=bot_api[1])
    yield api
    await api.aclose()


@pytest.fixture
def bot(bot_api: tuple[BotApiServer, str], token: str) -> Bot:
    return bot_api[0].bot(token)


class TestWitness:
    async def test_it_knows_who_it_is(self, witness: telegram.Bot, bot: Bot) -> None:
        me = await witness.get_me()
        assert (me.id, me.is_bot) == (bot.id, True)

    async def test_it_sends_messages(self, witness: telegram.Bot) -> None:
        sent = await witness.send_message(
            updates.FORUM, "<b>5 &lt; 6</b>", parse_mode="HTML", message_thread_id=77
        )
        assert (sent.text, sent.chat.id, sent.message_thread_id) == ("5 < 6", updates.FORUM, 77)
        assert sent.is_topic_message

    async def test_it_is_refused_as_by_telegram(
        self,
        witness: telegram.Bot,
        bot: Bot,
        bot_api: tuple[BotApiServer, str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("PTB_TIMEDELTA", "1")  # how it will be; otherwise it warns
        with pytest.raises(telegram.error.BadRequest, match="Can't parse entities"):
            await witness.send_message(42, "<b>crossed <i></b></i>", parse_mode="HTML")
        with pytest.raises(telegram.error.BadRequest, match="Message is too long"):
            await witness.send_message(42, "x" * 4097)
        bot.fail("sendMessage", 429, "Too Many Requests: retry after 5", retry_after=5)
        with pytest.raises(telegram.error.RetryAfter):
            await witness.send_message(42, "x")
        bot.fail("sendMessage", 403, "Forbidden: bot was blocked by the user")
        with pytest.raises(telegram.error.Forbidden):
            await witness.send_message(42, "x")
        with pytest.raises(telegram.error.InvalidToken):
            async with telegram.Bot("no-token", base_url=f"{bot_api[1]}/bot"):
                pass

    async def test_it_sets_a_webhook(self, witness: telegram.Bot, bot: Bot) -> None:
        url = "https://bot.example.org/telegram/webhook"
        assert await witness.set_webhook(url, secret_token="s3cret", allowed_updates=["message"])
        info = await witness.get_webhook_info()
        assert (info.url, info.allowed_updates) == (url, ("message",))
        assert bot.webhook["secret_token"] == "s3cret"
        with pytest.raises(telegram.error.BadRequest, match="an https url must be provided"):
            await witness.set_webhook("http://bot.example.org")

    async def test_it_answers_buttons(self, witness: telegram.Bot) -> None:
        assert await witness.answer_callback_query("4382bfdwdsb323b2d9", "Approved")

    @pytest.mark.parametrize(
        ("update", "effective"),
        [
            (updates.text_update(), "message"),
            (updates.photo_update("caption"), "message"),
            (updates.document_update("caption"), "message"),
            (updates.topic_update(77), "message"),
            (updates.edit_update(), "edited_message"),
            (updates.channel_post_update(), "channel_post"),
            (updates.button_update(), "callback_query"),
            (updates.joined_update(), "message"),
            (updates.anonymous_update(), "message"),
        ],
    )
    def test_it_reads_the_updates_of_these_tests(
        self, update: dict[str, Any], effective: str, witness: telegram.Bot
    ) -> None:
        """Nothing in them is unknown to it, so they are what Telegram sends."""
        read = telegram.Update.de_json(update, witness)
        assert getattr(read, effective) is not None
        assert list(unknown_fields(read)) == []


def unknown_fields(read: telegram.TelegramObject) -> list[str]:
    parts = [read, *(getattr(read, name) for name in read.__slots__)]
    found = [part for part in parts if isinstance(part, telegram.TelegramObject)]
    return [name for part in found for name in part.api_kwargs]


class TestClient:
    async def test_a_parse_error_is_tried_once_more_as_plain_text(self, api: BotApi, bot: Bot) -> None:
        bot.fail("sendMessage", 400, "Bad Request: can't parse entities: whatever")
        await api.send_message("42", "*Hi*")
        assert bot.calls[1:] == [("sendMessage", {"chat_id": "42", "text": "*Hi*"})]
        for _ in range(2):
            bot.fail("sendMessage", 400, "Bad Request: can't parse entities: whatever")
        with pytest.raises(BotApiError, match="can't parse"):
            await api.send_message("42", "*Hi*")
        assert len(bot.calls) == 4

    @pytest.mark.parametrize("code", [400, 401, 403, 429, 500])
    async def test_other_errors_are_raised_at_once(self, code: int, api: BotApi, bot: Bot) -> None:
        bot.fail("sendMessage", code, "Something: else")
        with pytest.raises(BotApiError, match=f"sendMessage: {code} Something: else") as caught:
            await api.send_message("42", "Hi")
        assert caught.value.code == code
        assert len(bot.calls) == 1

    @pytest.mark.parametrize("answer", [httpx.Response(502, text="<html>"), httpx.Response(200, json=[])])
    async def test_an_answer_that_is_not_telegrams_is_an_error(
        self, answer: httpx.Response, api: BotApi
    ) -> None:
        api._client = httpx.AsyncClient(transport=httpx.MockTransport(lambda request: answer))
        with pytest.raises(BotApiError, match=f"status {answer.status_code} without a JSON object"):
            await api.send_message("42", "Hi")

    async def test_the_token_is_in_no_log_and_no_error(
        self, token: str, api: BotApi, bot: Bot, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        await api.send_message("42", "Hi")
        bot.fail("sendMessage", 403, "Forbidden")
        with pytest.raises(BotApiError) as refused:
            await api.send_message("42", "Hi")
        unreachable = BotApi(token, api_base="http://127.0.0.1:1")
        with pytest.raises(BotApiError) as unanswered:
            await unreachable.send_message("42", "Hi")
        await unreachable.aclose()
        secret = token.partition(":")[2]
        assert "bot***/sendMessage" in caplog.text
        assert secret not in caplog.text + str(refused.value) + str(unanswered.value)
