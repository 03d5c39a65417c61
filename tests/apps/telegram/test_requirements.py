"""The numbered requirements, one by one; docs/services/telegram.md lists them with these tests."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from uuid import uuid4

import pytest
from redis.asyncio import Redis

from headgate.stores.kv import purge
from headgate.testing import FakeClock
from headgate_services.telegram.config import load_settings
from tests.apps.telegram.conftest import BEGINNING, HOUR, SECRET, Handler, RecordingKV, Service, Start
from tests.apps.telegram.updates import (
    FORUM,
    anonymous_update,
    button_update,
    channel_post_update,
    edit_update,
    photo_update,
    text_update,
    topic_update,
)

REFUSAL = "You've reached the message limit. Please try again later."
THIS_HOUR = int(BEGINNING) // HOUR


class TestCounter:
    @pytest.mark.requirement("T-01")
    async def test_one_entry_per_user_and_window(
        self, service: Service, kv: RecordingKV, clock: FakeClock
    ) -> None:
        await service.send(text_update(42), text_update(42), text_update(43))
        assert len(await kv.content()) == 2
        clock.advance(HOUR - 1)
        await service.send(text_update(42))
        assert len(await kv.content()) == 2
        clock.advance(1)
        await service.send(text_update(42))
        assert len([key for key in kv.ttls if key.startswith("ratelimit:42:")]) == 2

    @pytest.mark.requirement("T-02")
    async def test_key_is_ratelimit_user_and_window(self, service: Service, kv: RecordingKV) -> None:
        await service.send(text_update(42))
        assert list(await kv.content()) == [f"ratelimit:42:{THIS_HOUR}"]

    @pytest.mark.requirement("T-03")
    @pytest.mark.parametrize("window_ms", [1, 7, 1000, 90_500, 3_600_000])
    async def test_window_key_is_epoch_milliseconds_divided_by_the_window(
        self, window_ms: int, start: Start, kv: RecordingKV, clock: FakeClock
    ) -> None:
        service = await start(RATE_LIMIT_WINDOW_MS=str(window_ms))
        clock.set(1_700_000_123.456_999)
        await service.send(text_update(42))
        assert list(kv.ttls) == [f"ratelimit:42:{1_700_000_123_456 // window_ms}"]

    @pytest.mark.requirement("T-04")
    async def test_value_is_the_count_in_decimal(self, service: Service, kv: RecordingKV) -> None:
        for expected in range(1, 13):
            await service.send(text_update(42))
            assert await kv.content() == {f"ratelimit:42:{THIS_HOUR}": str(expected)}

    @pytest.mark.requirement("T-05")
    async def test_each_admitted_message_increments_and_a_refused_one_does_not(
        self, start: Start, kv: RecordingKV
    ) -> None:
        service = await start(RATE_LIMIT_MAX="3")
        for expected in ("1", "2", "3", "3", "3"):
            await service.send(text_update(42))
            assert list((await kv.content()).values()) == [expected]

    @pytest.mark.requirement("T-06")
    @pytest.mark.parametrize(
        ("window_ms", "ttl"), [(3_600_000, 3600), (90_500, 91), (60_000, 60), (59_999, 60), (1, 60)]
    )
    async def test_entries_live_for_the_window_in_seconds_and_then_vanish(
        self, window_ms: int, ttl: int, start: Start, kv: RecordingKV, clock: FakeClock
    ) -> None:
        service = await start(RATE_LIMIT_WINDOW_MS=str(window_ms))
        await service.send(text_update(42))
        assert list(kv.ttls.values()) == [ttl]
        clock.advance(ttl)
        assert await kv.content() == {}

    @pytest.mark.requirement("T-07")
    async def test_a_user_never_uses_the_budget_of_another_in_the_same_chat(self, start: Start) -> None:
        service = await start(RATE_LIMIT_MAX="1")
        await service.send(topic_update(5, 42, "a"), topic_update(5, 42, "b"), topic_update(5, 43, "c"))
        assert service.handler.texts == ["a", "c"]

    @pytest.mark.requirement("T-07")
    async def test_a_user_has_one_budget_for_all_chats(self, start: Start) -> None:
        service = await start(RATE_LIMIT_MAX="1")
        await service.send(text_update(42, "a"), topic_update(5, 42, "b"))
        assert service.handler.texts == ["a"]

    @pytest.mark.requirement("T-08")
    async def test_all_users_have_the_same_limit(self, start: Start) -> None:
        service = await start(RATE_LIMIT_MAX="2")
        for user in (42, 43):
            await service.send(*(text_update(user, str(user)) for _ in range(5)))
        assert service.handler.texts == ["42", "42", "43", "43"]

    @pytest.mark.requirement("T-09")
    async def test_a_message_is_one_read_and_at_most_one_write(self, start: Start, kv: RecordingKV) -> None:
        service = await start(RATE_LIMIT_MAX="2")
        await service.send(text_update(), text_update())
        assert kv.calls == ["get", "put", "get", "put"]
        kv.calls.clear()
        await service.send(text_update())
        assert kv.calls == ["get"]

    @pytest.mark.requirement("T-24")
    async def test_a_new_window_starts_from_zero(
        self, start: Start, kv: RecordingKV, clock: FakeClock
    ) -> None:
        service = await start(RATE_LIMIT_MAX="1")
        await service.send(text_update(text="a"), text_update(text="b"))
        clock.set(BEGINNING + HOUR - 0.001)
        await service.send(text_update(text="c"))
        clock.set(BEGINNING + HOUR)
        await service.send(text_update(text="d"))
        assert service.handler.texts == ["a", "d"]
        assert (await kv.content())[f"ratelimit:42:{THIS_HOUR + 1}"] == "1"


class TestPlacement:
    @pytest.mark.requirement("T-10")
    async def test_the_limit_is_in_the_webhook_the_only_way_in(self, service: Service) -> None:
        await service.send(text_update())
        assert len(service.handler.events) == 1
        assert (await service.client.get("/")).text == "OK"
        for path in ("/", "/telegram", "/telegram/webhook/", "/docs", "/openapi.json"):
            response = await service.client.post(path, json=text_update())
            assert response.status_code in {307, 404, 405}
        assert (await service.client.get("/telegram/webhook")).status_code == 405
        assert len(service.handler.events) == 1

    @pytest.mark.requirement("T-11")
    @pytest.mark.parametrize("secret", [None, "", "wrong", SECRET + "x", SECRET[:-1], SECRET.upper(), "é"])
    async def test_a_wrong_secret_touches_no_counter(
        self, secret: str | None, service: Service, kv: RecordingKV
    ) -> None:
        headers = [] if secret is None else [(b"X-Telegram-Bot-Api-Secret-Token", secret.encode("latin-1"))]
        response = await service.client.post("/telegram/webhook", json=text_update(), headers=headers)
        assert (response.status_code, response.text) == (401, "Unauthorized")
        assert (kv.calls, service.handler.events, service.bot.calls) == ([], [], [])

    @pytest.mark.requirement("T-11")
    async def test_a_stranger_touches_no_counter_and_gets_no_answer(
        self, service: Service, kv: RecordingKV
    ) -> None:
        await service.send(text_update(44), topic_update(5, 44), button_update(44))
        assert (kv.calls, service.handler.events, service.bot.calls) == ([], [], [])

    @pytest.mark.requirement("T-12", "T-22")
    async def test_a_refused_message_is_not_dispatched(self, start: Start) -> None:
        service = await start(RATE_LIMIT_MAX="1")
        await service.send(text_update(text="a"), text_update(text="b"), photo_update("c"))
        assert service.handler.texts == ["a"]

    @pytest.mark.requirement("T-13")
    async def test_the_limit_is_checked_before_the_handler_runs_and_never_inside(
        self, start: Start, kv: RecordingKV
    ) -> None:
        calls_so_far: list[list[str]] = []

        async def look() -> None:
            calls_so_far.append(list(kv.calls))
            await asyncio.sleep(0)

        service = await start(handler=Handler(before=look))
        await service.send(text_update())
        assert calls_so_far == [["get", "put"]]
        assert kv.calls == ["get", "put"]

    @pytest.mark.requirement("T-14")
    async def test_the_check_is_awaited(self, start: Start, clock: FakeClock) -> None:
        let_go = asyncio.Event()

        class SlowKV(RecordingKV):
            async def get(self, key: str) -> str | None:
                await let_go.wait()
                return await super().get(key)

        service = await start(kv=SlowKV(clock), RATE_LIMIT_MAX="1")
        request = asyncio.create_task(service.post(text_update()))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not request.done()
        assert service.handler.events == []
        let_go.set()
        assert (await request).status_code == 200
        await service.send(text_update(), text_update())
        assert len(service.handler.events) == 1


class TestConfiguration:
    @pytest.mark.requirement("T-15")
    async def test_twenty_messages_by_default(self, service: Service) -> None:
        await service.send(*(text_update(text=str(number)) for number in range(1, 23)))
        assert service.handler.texts == [str(number) for number in range(1, 21)]
        assert len(service.bot.sent()) == 2

    @pytest.mark.requirement("T-15")
    async def test_the_maximum_can_be_set(self, start: Start) -> None:
        service = await start(RATE_LIMIT_MAX="3")
        await service.send(*(text_update() for _ in range(4)))
        assert len(service.handler.events) == 3

    @pytest.mark.requirement("T-16")
    async def test_the_window_is_an_hour_by_default_and_can_be_set(
        self, start: Start, kv: RecordingKV, clock: FakeClock
    ) -> None:
        await (await start()).send(text_update(42))
        await (await start(RATE_LIMIT_WINDOW_MS="120000")).send(text_update(43))
        assert kv.ttls == {
            f"ratelimit:42:{clock.now_us() // 3_600_000_000}": 3600,
            f"ratelimit:43:{clock.now_us() // 120_000_000}": 120,
        }

    @pytest.mark.requirement("T-17")
    def test_only_the_environment_counts_and_the_limit_needs_none_of_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for name in (".env", "config.toml", "settings.json"):
            (tmp_path / name).write_text("RATE_LIMIT_MAX=3\n")
        caplog.set_level(logging.WARNING)
        monkeypatch.setenv("TELEGRAM_BOT_TOKEN", "1:a")
        monkeypatch.setenv("TELEGRAM_WEBHOOK_SECRET", "s")
        settings = load_settings()
        assert (settings.rate_limit_max, settings.rate_limit_window_ms) == (20, 3_600_000)
        assert settings.rate_limit_algorithm == "fixed_window"
        assert caplog.text == ""

    @pytest.mark.requirement("T-18")
    @pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_window"])
    async def test_the_namespace_holds_nothing_but_the_limit(
        self, algorithm: str, start: Start, kv: RecordingKV
    ) -> None:
        service = await start(RATE_LIMIT_MAX="2", RATE_LIMIT_ALGORITHM=algorithm)
        await service.send(*(text_update() for _ in range(4)), topic_update(5, 43), button_update())
        await service.send(edit_update(), channel_post_update(), anonymous_update(), text_update(44))
        await service.post(b"{")
        service.handler.error = RuntimeError("down")
        assert (await service.post(text_update(43))).status_code == 500
        assert len(await kv.content()) == 2
        assert all(key.startswith(("ratelimit:42:", "ratelimit:43:")) for key in await kv.content())

    @pytest.mark.requirement("T-18")
    async def test_a_redis_database_holds_nothing_but_the_limit(
        self, start: Start, redis_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With no other setting: the ids of updates are kept elsewhere."""
        monkeypatch.chdir(tmp_path)
        prefix = uuid4().hex
        service = await start(kv=None, RATE_LIMIT_KV=f"{redis_server}?prefix={prefix}", RATE_LIMIT_MAX="1")
        await service.send(text_update(), text_update(), button_update())
        async with Redis.from_url(redis_server) as client:
            found = [key.decode() async for key in client.scan_iter(match=f"{prefix}*")]
        assert len(found) == 1
        assert found[0].startswith(f"{prefix}ratelimit:42:")

    @pytest.mark.requirement("T-19")
    async def test_purging_the_namespace_resets_the_limits(self, start: Start, kv: RecordingKV) -> None:
        service = await start(RATE_LIMIT_MAX="1")
        seen = text_update(text="a")
        await service.send(seen, text_update(text="b"))
        assert await purge(kv) == 1
        await service.send(text_update(text="c"), seen)
        assert service.handler.texts == ["a", "c"]  # and nothing else: the update is still known


class TestRefusal:
    @pytest.mark.requirement("T-20")
    async def test_the_refused_user_is_told_so_in_these_words(self, start: Start) -> None:
        service = await start(RATE_LIMIT_MAX="1")
        await service.send(text_update(), text_update())
        assert service.bot.sent() == [{"chat_id": "42", "text": REFUSAL, "parse_mode": "HTML"}]
        assert REFUSAL.isascii()

    @pytest.mark.requirement("T-20")
    async def test_the_answer_goes_to_the_same_chat_and_topic(self, start: Start) -> None:
        service = await start(RATE_LIMIT_MAX="1")
        await service.send(text_update(), topic_update(77))
        (sent,) = service.bot.sent()
        assert (sent["chat_id"], sent["message_thread_id"]) == (str(FORUM), 77)

    @pytest.mark.requirement("T-21")
    async def test_telegram_is_told_that_all_is_well(self, start: Start) -> None:
        service = await start(RATE_LIMIT_MAX="1")
        await service.send(text_update())
        response = await service.post(text_update())
        assert (response.status_code, response.json()) == (200, {"ok": True})
        assert response.headers["content-type"] == "application/json"

    @pytest.mark.requirement("T-23")
    async def test_nobody_can_send_without_end(self, service: Service) -> None:
        updates = [text_update(user, text=f"{user}") for _ in range(100) for user in (42, 43)]
        for response in await asyncio.gather(*(service.post(update) for update in updates)):
            assert response.status_code == 200
        assert sorted(service.handler.texts) == ["42"] * 20 + ["43"] * 20
        assert [sent["text"] for sent in service.bot.sent()] == [REFUSAL] * 160
