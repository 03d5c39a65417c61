"""Updates that were dispatched before: over restarts, between processes, and while their store is down."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from headgate import StoreUnavailable
from headgate.stores.kv import MemoryKV, open_kv
from headgate_services.telegram.config import TelegramSettings
from headgate_services.telegram.seen import SeenUpdates
from tests.apps.telegram.conftest import Handler, Service
from tests.apps.telegram.updates import text_update

Start = Callable[..., Awaitable[Service]]


async def is_new(seen: SeenUpdates, update_id: int) -> bool:
    async with seen.turn(update_id) as new:
        return new


async def test_ids_survive_a_restart(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'updates.db'}"
    before = open_kv(url)
    await SeenUpdates(before).add(7)
    await before.aclose()
    after = open_kv(url)
    assert [await is_new(SeenUpdates(after), number) for number in (7, 8)] == [False, True]
    await after.aclose()


async def test_processes_share_what_was_dispatched(start: Start) -> None:
    updates, update = MemoryKV(), text_update()
    one, two = await start(updates_kv=updates), await start(updates_kv=updates)
    await one.send(update)
    await two.send(update)
    assert (len(one.handler.texts), len(two.handler.texts)) == (1, 0)


async def test_what_failed_is_dispatched_again_by_any_process(start: Start) -> None:
    updates, update = MemoryKV(), text_update()
    one, two = await start(updates_kv=updates), await start(updates_kv=updates)
    one.handler.error = RuntimeError("no")
    assert (await one.post(update)).status_code == 500
    await two.send(update)
    assert len(two.handler.texts) == 1


async def test_while_the_store_is_down_memory_has_to_do(caplog: pytest.LogCaptureFixture) -> None:
    class DownKV(MemoryKV):
        async def get(self, key: str) -> str | None:
            raise StoreUnavailable("down")

        async def put(self, key: str, value: str, ttl: int) -> None:
            raise StoreUnavailable("down")

    seen = SeenUpdates(DownKV())
    assert await is_new(seen, 1)
    await seen.add(1)
    assert not await is_new(seen, 1)
    assert "remembered in memory only" in caplog.text


@pytest.mark.parametrize(
    ("counts", "given", "updates"),
    [
        ("sqlite:///telegram-ratelimit.db", "", "sqlite:///telegram-updates.db"),
        ("cloudflare", "", "sqlite:///telegram-updates.db"),
        ("memory://", "", "memory://"),
        ("redis://h/1", "", "redis://h/1?prefix=telegram-"),
        ("redis://h/1?prefix=bot%3A", "", "redis://h/1?prefix=bot%3Atelegram-"),
        ("redis://h/1", "redis://h/2", "redis://h/2"),
    ],
)
def test_ids_are_kept_beside_the_counts_and_never_among_them(counts: str, given: str, updates: str) -> None:
    settings = TelegramSettings(
        bot_token="1:x", webhook_secret="s", rate_limit_kv=counts, seen_updates_kv=given
    )
    assert settings.updates_kv == updates


async def test_a_restarted_service_does_not_dispatch_again(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    update = text_update()
    for expected in (1, 0):
        handler = Handler()
        service = await start(kv=None, handler=handler)
        await service.send(update)
        assert len(handler.texts) == expected


async def test_metrics_count_updates_and_decisions(start: Start) -> None:
    service = await start(RATE_LIMIT_MAX="1")
    update = text_update()
    await service.send(update, update, text_update())
    text = (await service.client.get("/metrics")).text
    for outcome, count in {"dispatched": 1, "repeated": 1, "refused": 1, "failed": 0}.items():
        assert f'telegram_updates_total{{outcome="{outcome}"}} {count}.0' in text
    assert 'headgate_decisions_total{degraded="false",limiter="telegram",outcome="refused"' in text
