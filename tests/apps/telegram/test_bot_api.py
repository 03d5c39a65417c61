"""Our client of the Bot API."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import httpx
import pytest

from headgate_services.telegram.bot_api import BotApi, BotApiError
from tests.apps.telegram.bot_api_server import Bot, BotApiServer


@pytest.fixture
async def api(bot_api: tuple[BotApiServer, str], token: str) -> AsyncIterator[BotApi]:
    api = BotApi(token, api_base=bot_api[1])
    yield api
    await api.aclose()


async def test_a_parse_error_is_tried_once_more_as_plain_text(api: BotApi, bot: Bot) -> None:
    bot.fail("sendMessage", 400, "Bad Request: can't parse entities: whatever")
    await api.send_message("42", "*Hi*")
    assert bot.calls[1:] == [("sendMessage", {"chat_id": "42", "text": "*Hi*"})]
    for _ in range(2):
        bot.fail("sendMessage", 400, "Bad Request: can't parse entities: whatever")
    with pytest.raises(BotApiError, match="can't parse"):
        await api.send_message("42", "*Hi*")
    assert len(bot.calls) == 4


@pytest.mark.parametrize("code", [400, 401, 403, 429, 500])
async def test_other_errors_are_raised_at_once(code: int, api: BotApi, bot: Bot) -> None:
    bot.fail("sendMessage", code, "Something: else")
    with pytest.raises(BotApiError, match=f"sendMessage: {code} Something: else") as caught:
        await api.send_message("42", "Hi")
    assert caught.value.code == code
    assert len(bot.calls) == 1


@pytest.mark.parametrize("answer", [httpx.Response(502, text="<html>"), httpx.Response(200, json=[])])
async def test_an_answer_that_is_not_telegrams_is_an_error(answer: httpx.Response, api: BotApi) -> None:
    api._client = httpx.AsyncClient(transport=httpx.MockTransport(lambda request: answer))
    with pytest.raises(BotApiError, match=f"status {answer.status_code} without a JSON object"):
        await api.send_message("42", "Hi")


async def test_the_token_is_in_no_log_and_no_error(
    token: str, api: BotApi, bot: Bot, caplog: pytest.LogCaptureFixture
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
