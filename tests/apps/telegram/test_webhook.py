"""The webhook, including the ambiguities TX-1 to TX-10 of the requirements."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from typing import Any

import pytest

from headgate import StoreUnavailable
from headgate.testing import FakeClock
from headgate_services.telegram import ButtonPress, Message
from headgate_services.telegram import bot_api as bot_api_module
from headgate_services.telegram.bot_api import BotApi
from tests.apps.processes import until
from tests.apps.telegram.bot_api_server import Bot, BotApiServer, refusal
from tests.apps.telegram.conftest import BEGINNING, Handler, RecordingKV, Service, Start
from tests.apps.telegram.updates import (
    anonymous_update,
    button_update,
    channel_post_update,
    edit_update,
    joined_update,
    message,
    photo_update,
    text_update,
    update,
)


class TestWhatIsDispatched:
    async def test_a_text(self, service: Service) -> None:
        sent = text_update(text="Hello & <b>bye</b>")
        await service.send(sent)
        assert service.handler.events == [Message(sent["update_id"], 1365, "42", "42", "Hello & <b>bye</b>")]

    @pytest.mark.parametrize(
        "ignored",
        [
            photo_update(None),
            joined_update(),
            anonymous_update(),
            edit_update(),
            channel_post_update(),
            update(),
            update(my_chat_member={"chat": {"id": 42, "type": "private"}, "date": 1}),
            text_update(text=""),
        ],
        ids=["no caption", "joined", "anonymous", "edit", "channel", "nothing", "unknown kind", "empty"],
    )
    async def test_what_nobody_wrote_is_taken_and_ignored(
        self, ignored: dict[str, Any], service: Service, kv: RecordingKV
    ) -> None:
        await service.send(ignored)
        assert (service.handler.events, kv.calls, service.bot.calls) == ([], [], [])

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"{",
            b"\xff\xfe",
            b"null",
            b"[]",
            b"42",
            b"[" * 100_000,
            json.dumps({"message": message()}).encode(),
            json.dumps({"update_id": "7", "message": message()}).encode(),
            json.dumps({"update_id": True, "message": message()}).encode(),
            json.dumps({"update_id": 7, "message": "Hello"}).encode(),
            json.dumps({"update_id": 7, "message": message(text=None, caption=5)}).encode(),
            json.dumps({"update_id": 7, "message": message() | {"from": {"id": "42"}}}).encode(),
            json.dumps({"update_id": 7, "message": message() | {"from": {"id": 42}}}).encode(),
            json.dumps({"update_id": 7, "message": message() | {"chat": {"id": 42.5, "type": "x"}}}).encode(),
            json.dumps({"update_id": 7, "message": message() | {"message_thread_id": "5"}}).encode(),
            json.dumps({"update_id": 7, "message": message(photo="picture")}).encode(),
            json.dumps({"update_id": 7, "callback_query": {"id": 5}}).encode(),
        ],
    )
    async def test_what_is_no_update_is_taken_and_ignored(
        self, body: bytes, service: Service, kv: RecordingKV
    ) -> None:
        await service.send(body)
        assert (service.handler.events, kv.calls, service.bot.calls) == ([], [], [])

    async def test_the_secret_is_checked_before_the_body(self, service: Service) -> None:
        assert (await service.post(b"{", secret="wrong")).status_code == 401


class TestButtons:
    """TX-7: button presses are not messages."""

    async def test_a_press_is_dispatched_and_answered_but_not_counted(
        self, service: Service, kv: RecordingKV
    ) -> None:
        service.handler.reply = "Approved"
        sent = button_update(data="approve:7")
        await service.send(sent)
        press = ButtonPress(sent["update_id"], "4382bfdwdsb323b2d9", "42", "approve:7", "42")
        assert service.handler.events == [press]
        answer = {"callback_query_id": "4382bfdwdsb323b2d9", "text": "Approved"}
        assert service.bot.calls == [("answerCallbackQuery", answer)]
        assert kv.calls == []

    async def test_a_press_that_comes_with_a_message_is_a_press(self, service: Service) -> None:
        await service.send(button_update(message=message()))
        assert [event.kind for event in service.handler.events] == ["button"]

    async def test_a_press_without_message_or_data_is_a_press(self, service: Service) -> None:
        bare = button_update(data=None)
        del bare["callback_query"]["message"]
        await service.send(bare)
        (press,) = service.handler.events
        assert isinstance(press, ButtonPress)
        assert (press.chat_id, press.data, press.message_thread_id) == (None, None, None)

    async def test_a_failure_is_logged_and_not_delivered_again(
        self, service: Service, caplog: pytest.LogCaptureFixture
    ) -> None:
        service.handler.error = RuntimeError("down")
        await service.send(button_update())
        assert "button pressed by user 42" in caplog.text
        service.handler.error = None
        service.bot.fail("answerCallbackQuery", 400, "Bad Request: query is too old")
        await service.send(button_update())
        assert "query is too old" in caplog.text

    async def test_the_same_press_is_dispatched_once(self, service: Service) -> None:
        press = button_update()
        await service.send(press, press)
        assert len(service.handler.events) == 1


class TestReplies:
    async def test_a_long_answer_is_sent_in_parts(self, service: Service) -> None:
        service.handler.reply = "a" * 4000 + "\n" + "b" * 5000
        await service.send(text_update())
        texts = [sent["text"] for sent in service.bot.sent()]
        assert [len(text) for text in texts] == [4001, 4096, 904]
        assert "".join(texts) == service.handler.reply

    async def test_an_answer_that_fails_is_logged_and_the_message_stays_dispatched(
        self, service: Service, kv: RecordingKV, caplog: pytest.LogCaptureFixture
    ) -> None:
        service.handler.reply = "Hello"
        service.bot.fail("sendMessage", 403, "Forbidden: bot was blocked by the user")
        sent = text_update()
        await service.send(sent, sent)
        assert "bot was blocked by the user" in caplog.text
        assert len(service.handler.events) == 1
        assert list((await kv.content()).values()) == ["1"]

    async def test_a_refusal_that_cannot_be_sent_is_logged_and_changes_nothing(
        self, start: Start, caplog: pytest.LogCaptureFixture
    ) -> None:
        """TX-6."""
        service = await start(RATE_LIMIT_MAX="1")
        service.bot.fail("sendMessage", 403, "Forbidden: bot was blocked by the user")
        await service.send(text_update(), text_update())
        assert "bot was blocked by the user" in caplog.text
        assert len(service.handler.events) == 1

    async def test_answers_to_refusals_can_be_limited(self, start: Start, clock: FakeClock) -> None:
        service = await start(RATE_LIMIT_MAX="1", RATE_LIMIT_REPLIES="1/minute")
        await service.send(*(text_update() for _ in range(6)), text_update(43), text_update(43))
        assert [sent["chat_id"] for sent in service.bot.sent()] == ["42", "43"]
        clock.advance(61)
        await service.send(text_update())
        assert len(service.bot.sent()) == 3
        assert len(service.handler.events) == 2


class HeldClock(FakeClock):
    """Pauses end only after `go`.

    Attributes:
        pauses: The seconds of each pause.
        begun: Set when the first pause begins.
    """

    def __init__(self) -> None:
        super().__init__(BEGINNING)
        self.pauses: list[float] = []
        self.begun = asyncio.Event()
        self.go = asyncio.Event()

    async def asleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.begun.set()
        await self.go.wait()
        await super().asleep(seconds)


def too_many(service: Service, times: int, method: str = "sendMessage") -> None:
    for _ in range(times):
        service.bot.fail(method, 429, "Too Many Requests: retry after 1", retry_after=1)


class TestTooManyReplies:
    """Telegram's 429: the webhook answers after the first attempt, the others are made in the background."""

    async def test_the_webhook_answers_after_the_first_attempt(self, start: Start) -> None:
        clock = HeldClock()
        service = await start(clock=clock, RATE_LIMIT_MAX="1")
        too_many(service, 1)
        await service.send(text_update(), text_update())
        assert len(service.bot.sent()) == 1
        clock.go.set()
        await until(lambda: len(service.bot.sent()) == 2)
        assert service.bot.sent()[0] == service.bot.sent()[1]
        assert clock.pauses == [1]

    async def test_retries_are_bounded(self, start: Start, caplog: pytest.LogCaptureFixture) -> None:
        service = await start(RATE_LIMIT_MAX="1")
        too_many(service, 100)
        await service.send(text_update(), text_update())
        await until(lambda: "a delayed reply was not sent" in caplog.text)
        assert len(service.bot.sent()) == 4

    async def test_only_the_parts_that_are_missing_are_sent_later(self, start: Start) -> None:
        clock = HeldClock()
        service = await start(clock=clock)
        service.handler.reply = "a" * 4096 + "b" * 4096 + "c"
        service.bot.failures["sendMessage"] = deque([None, refusal(429, "Too Many Requests", retry_after=1)])
        await service.send(text_update())
        assert [message["text"][0] for message in service.bot.sent()] == ["a", "b"]
        clock.go.set()
        await until(lambda: len(service.bot.sent()) == 4)
        assert [message["text"][0] for message in service.bot.sent()] == ["a", "b", "b", "c"]

    async def test_a_button_is_confirmed_later(self, start: Start) -> None:
        clock = HeldClock()
        service = await start(clock=clock)
        too_many(service, 1, "answerCallbackQuery")
        await service.send(button_update())
        assert len(service.bot.calls) == 1
        clock.go.set()
        await until(lambda: len(service.bot.calls) == 2)

    async def test_delayed_replies_are_bounded(
        self, start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bot_api_module, "MOST_DELAYED", 2)
        clock = HeldClock()
        service = await start(clock=clock)
        service.handler.reply = "Hello"
        too_many(service, 3)
        await service.send(text_update(), text_update())
        assert "the reply to chat 42 could not be sent" not in caplog.text
        await service.send(text_update())
        assert "the reply to chat 42 could not be sent" in caplog.text

    async def test_a_bot_that_stops_gives_delayed_replies_up(
        self, token: str, bot: Bot, bot_api: tuple[BotApiServer, str], caplog: pytest.LogCaptureFixture
    ) -> None:
        clock = HeldClock()
        api = BotApi(token, api_base=bot_api[1], clock=clock)
        bot.fail("sendMessage", 429, "Too Many Requests: retry after 1", retry_after=1)
        await api.send_message("42", "Hello")
        await clock.begun.wait()
        await api.aclose()
        assert "1 delayed replies are not sent" in caplog.text
        assert len(bot.sent()) == 1


class BrokenKV(RecordingKV):
    """A key-value store that fails at one of its calls."""

    def __init__(self, clock: FakeClock, failing: str, error: Exception) -> None:
        super().__init__(clock)
        self.failing = failing
        self.error = error

    async def get(self, key: str) -> str | None:
        if self.failing == "get":
            raise self.error
        return await super().get(key)

    async def put(self, key: str, value: str, ttl: int) -> None:
        if self.failing == "put":
            raise self.error
        await super().put(key, value, ttl)


class TestFailingStore:
    """TX-5: without an answer of the limiter, the message is let through."""

    @pytest.mark.parametrize("failing", ["get", "put"])
    @pytest.mark.parametrize(
        "error", [StoreUnavailable("down"), OSError("broken"), ValueError("odd")], ids=repr
    )
    async def test_the_message_is_dispatched_and_the_error_logged(
        self, failing: str, error: Exception, start: Start, clock: FakeClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        service = await start(kv=BrokenKV(clock, failing, error), RATE_LIMIT_MAX="1")
        await service.send(text_update(), text_update())
        assert len(service.handler.events) == 2
        errors = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert len(errors) == 2
        assert "limit of user 42 could not be checked" in errors[0].getMessage()
        assert errors[0].exc_info is not None

    async def test_a_store_that_hangs_is_waited_for_once(self, start: Start, clock: FakeClock) -> None:
        """Messages that wait for the same user are admitted together with the first."""
        time_out = asyncio.Event()

        class HangingKV(RecordingKV):
            async def get(self, key: str) -> str | None:
                self.calls.append("get")
                await time_out.wait()
                raise StoreUnavailable("no answer in time")

        kv = HangingKV(clock)
        service = await start(kv=kv, RATE_LIMIT_MAX="1")
        requests = [asyncio.create_task(service.post(text_update())) for _ in range(20)]
        for _ in range(50):
            await asyncio.sleep(0)
        time_out.set()
        assert {response.status_code for response in await asyncio.gather(*requests)} == {200}
        assert len(service.handler.events) == 20
        assert kv.calls == ["get"]

    async def test_a_dispatch_that_fails_then_has_nothing_to_give_back(
        self, start: Start, clock: FakeClock
    ) -> None:
        kv = BrokenKV(clock, "get", StoreUnavailable("down"))
        service = await start(kv=kv, handler=Handler(error=RuntimeError("also down")))
        assert (await service.post(text_update())).status_code == 500


class TestFailingDispatch:
    """TX-10: a message that was not dispatched is not counted, and Telegram delivers it again."""

    async def test_the_answer_is_500_and_the_unit_is_given_back(
        self, service: Service, kv: RecordingKV, caplog: pytest.LogCaptureFixture
    ) -> None:
        service.handler.error = RuntimeError("the agent is down")
        response = await service.post(text_update())
        assert (response.status_code, response.text) == (500, "Internal Server Error")
        assert "the agent is down" in caplog.text
        assert list((await kv.content()).values()) == ["0"]
        assert kv.calls == ["get", "put", "get", "put"]

    async def test_a_unit_that_cannot_be_given_back_is_logged(
        self, start: Start, clock: FakeClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        kv = BrokenKV(clock, "", StoreUnavailable("gone"))

        async def break_store() -> None:
            kv.failing = "put"

        service = await start(kv=kv, handler=Handler(error=RuntimeError("down"), before=break_store))
        assert (await service.post(text_update())).status_code == 500
        assert "could not be given back" in caplog.text
        assert list((await kv.content()).values()) == ["1"]


class TestSlidingWindow:
    """TL-1: never more than the maximum in any span as long as the window."""

    async def test_a_sliding_window_does_not(self, start: Start, clock: FakeClock) -> None:
        service = await start(RATE_LIMIT_MAX="5", RATE_LIMIT_ALGORITHM="sliding_window")
        times: list[float] = []

        async def note() -> None:
            times.append(clock.now)

        service.handler.before = note
        for _ in range(60):
            clock.advance(397.3)
            await service.send(text_update(), text_update())
        assert len(times) > 25
        for begin in times:
            assert sum(begin <= time < begin + 3600 for time in times) <= 5

    async def test_its_entries_are_its_own(self, start: Start, kv: RecordingKV) -> None:
        await (await start()).send(text_update())
        service = await start(RATE_LIMIT_ALGORITHM="sliding_window")
        await service.send(text_update(), text_update())
        content = await kv.content()
        assert sorted(content)[1:] == ["ratelimit:42:sliding_window:3600000"]
        assert str(content["ratelimit:42:sliding_window:3600000"]).startswith("v1:")
        assert sorted(kv.ttls.values()) == [3600, 3660]
