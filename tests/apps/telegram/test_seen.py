"""Updates that were dispatched before: over restarts, between processes, and while their store is down."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headgate import ConfigError, StoreUnavailable
from headgate.stores.kv import MemoryKV
from headgate.stores.kv.redis import RedisKV
from headgate.testing.servers import RedisServer
from headgate_services.telegram import create_app
from headgate_services.telegram.config import TelegramSettings
from headgate_services.telegram.seen import SeenUpdates
from tests.apps.processes import until
from tests.apps.telegram.conftest import Handler, Start
from tests.apps.telegram.updates import text_update


async def is_new(seen: SeenUpdates, update_id: int) -> bool:
    async with seen.turn(update_id) as new:
        return new


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
    assert "stored in memory only" in caplog.text


@pytest.mark.parametrize(
    ("counts", "given", "updates"),
    [
        ("sqlite:///telegram-ratelimit.db", "", "sqlite:///telegram-updates.db"),
        ("cloudflare", "", "sqlite:///telegram-updates.db"),
        ("memory://", "", "memory://"),
        ("redis://h/1", "", "sqlite:///telegram-updates.db"),
        ("redis://h/1", "redis://h/2", "redis://h/2"),
    ],
)
def test_ids_are_never_kept_among_the_counts(counts: str, given: str, updates: str) -> None:
    settings = TelegramSettings(
        telegram_bot_token="1:x", telegram_webhook_secret="s", rate_limit_kv=counts, seen_updates_kv=given
    )
    assert settings.updates_kv == updates


@pytest.mark.parametrize("url", ["redis://h/1", "sqlite:///telegram-ratelimit.db"])
def test_the_namespace_of_the_counts_is_refused_for_ids(url: str) -> None:
    with pytest.raises(ValueError, match="SEEN_UPDATES_KV: is the namespace of RATE_LIMIT_KV"):
        TelegramSettings(
            telegram_bot_token="1:x", telegram_webhook_secret="s", rate_limit_kv=url, seen_updates_kv=url
        )


@pytest.mark.parametrize("url", ["sqlite:////no/such/folder/x.db", "nonsense://x"])
def test_a_store_for_ids_that_cannot_be_opened_is_named(
    url: str, make_settings: Callable[..., TelegramSettings]
) -> None:
    with pytest.raises(ConfigError, match="SEEN_UPDATES_KV: "):
        create_app(make_settings(RATE_LIMIT_KV="memory://", SEEN_UPDATES_KV=url))


async def test_a_redis_that_hangs_is_waited_for_once(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Once for the counts and once for the ids; later messages do not ask it."""
    with RedisServer() as server:
        counts, updates = (RedisKV.from_url(f"{server.url}?prefix={name}:", timeout=0.2) for name in "cu")
        service = await start(kv=counts, updates_kv=updates, clock=None, RATE_LIMIT_MAX="2")
        await service.send(text_update())
        server.pause()
        await service.send(*(text_update() for _ in range(5)))
        assert len(service.handler.texts) == 6
        assert caplog.text.count("is unavailable; until it is back") == 2
        assert caplog.text.count("the limit of user 42 could not be checked") == 5
        assert caplog.text.count("could not be looked up") == 5
        assert caplog.text.count("could not be looked up and is treated as new: not called") == 4
        assert caplog.text.count("is stored in memory only: not called") == 5
        server.resume()
        await until(lambda: caplog.text.count("is back after") == 2)
        await service.send(text_update(), text_update())
        assert len(service.handler.texts) == 7
        await counts.aclose()
        await updates.aclose()


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
