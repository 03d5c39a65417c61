"""Liveness and readiness of the services."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from headgate.testing.postgres_server import PostgresServer
from headgate.testing.servers import RedisServer
from headgate_server import kept_result
from headgate_services import mail, petitions, telegram, tiers
from headgate_services.common.health import add_health
from tests.apps.processes import PATIENCE, client_of


async def states(client: httpx.AsyncClient) -> tuple[int, dict[str, str]]:
    """Return the readiness of a service, which must always be live."""
    assert (await client.get("/livez")).json() == {"status": "ok"}
    answer = await client.get("/readyz")
    assert answer.json()["status"] == ("ok" if answer.status_code == 200 else "unavailable")
    return answer.status_code, answer.json()["stores"]


@pytest.mark.usefixtures("timeouts")
async def test_mail_is_ready_while_its_stores_answer(own_server: PostgresServer, own_url: str) -> None:
    with RedisServer() as redis:
        settings = mail.Settings(
            database_url=own_url,
            global_send_rate_limit_per_minute=5,
            rate_limit_store=redis.url,
        )
        async with client_of(mail.create_app(settings)) as client:
            assert await states(client) == (200, {"database": "ok", "rate_limit_store": "ok"})
            own_server.pause()
            assert await states(client) == (503, {"database": "unavailable", "rate_limit_store": "ok"})
            own_server.resume()
            async with asyncio.timeout(PATIENCE):
                while (await states(client))[0] != 200:  # noqa: ASYNC110  # until a probe succeeds
                    await asyncio.sleep(0)
            redis.kill()
            assert await states(client) == (503, {"database": "ok", "rate_limit_store": "unavailable"})


async def test_tiers_are_ready_while_their_stores_answer(tmp_path: Path) -> None:
    with RedisServer() as redis:
        settings = tiers.TiersSettings(
            database_url=f"sqlite:///{tmp_path / 'keys.db'}",
            saju_enable_rate_limiting=True,
            saju_redis_url=redis.url,
            saju_rate_limits="anonymous=1 burst 1",
        )
        async with client_of(tiers.create_app(settings)) as client:
            for _ in range(3):  # not limited
                assert await states(client) == (200, {"database": "ok", "redis": "ok"})
            redis.kill()
            assert await states(client) == (503, {"database": "ok", "redis": "unavailable"})


async def test_the_bot_is_ready_while_its_store_answers() -> None:
    with RedisServer() as redis:
        settings = telegram.TelegramSettings(
            telegram_bot_token="1:x",
            telegram_webhook_secret="s",
            rate_limit_kv=redis.url,
            seen_updates_kv="memory://",
        )
        async with client_of(telegram.create_app(settings)) as client:
            assert await states(client) == (200, {"rate_limit_kv": "ok"})
            redis.kill()
            assert await states(client) == (503, {"rate_limit_kv": "unavailable"})


@pytest.mark.usefixtures("timeouts")
async def test_petitions_are_ready_while_the_database_answers(
    own_server: PostgresServer, own_url: str
) -> None:
    settings = petitions.PetitionsSettings(database_url=own_url)
    async with client_of(petitions.create_app(settings)) as client:
        assert await states(client) == (200, {"database": "ok"})
        own_server.pause()
        assert await states(client) == (503, {"database": "unavailable"})
        own_server.resume()


async def test_many_requests_ask_a_store_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_result, "KEPT_SECONDS", math.inf)
    asked: list[None] = []

    async def check() -> None:
        await asyncio.sleep(0)
        asked.append(None)

    app = FastAPI()
    add_health(app, {"store": check})
    async with client_of(app) as client:
        answers = await asyncio.gather(*(states(client) for _ in range(20)))
        answers += [await states(client) for _ in range(20)]
    assert answers == [(200, {"store": "ok"})] * 40
    assert len(asked) == 1


async def test_a_store_that_never_answers_is_not_waited_for() -> None:
    async def hang() -> None:
        await forever.wait()

    forever = asyncio.Event()
    app = FastAPI()
    add_health(app, {"slow": hang}, patience=0.01)
    async with client_of(app) as client:
        assert await states(client) == (503, {"slow": "unavailable"})
