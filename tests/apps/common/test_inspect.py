"""The commands `inspect`, `reset` and `purge` of the services."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import uuid4

import pytest

from headgate.stores.kv import open_kv
from headgate.testing.servers import RedisServer
from headgate_server.cli import main
from headgate_services.mail import GlobalRateLimiter
from headgate_services.petitions.infrastructure.adapters.persistence import (
    Database,
    PostgresRateLimitStore,
    migrate,
)
from headgate_services.telegram import TelegramSettings
from headgate_services.telegram.rate_limiter import user_limiter
from headgate_services.tiers import TokenBucketRateLimiter, setup_rate_limiting


@pytest.fixture(autouse=True)
def _in_a_new_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command, which must succeed, and return its output."""
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_mail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    store = f"sqlite:///{tmp_path / 'limits.db'}"
    monkeypatch.setenv("GLOBAL_SEND_RATE_LIMIT_PER_MINUTE", "5")
    assert main(["mail", "inspect"]) == 1
    assert "RATE_LIMIT_STORE" in capsys.readouterr().err
    monkeypatch.setenv("RATE_LIMIT_STORE", store)
    GlobalRateLimiter(5, store=store).record()
    assert said(capsys, "mail", "inspect") == "per-minute: 1/5, per-hour: 1/unlimited\n"
    said(capsys, "mail", "reset")
    assert said(capsys, "mail", "inspect") == "per-minute: 0/5, per-hour: 0/unlimited\n"


def test_telegram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path / 'kv.db'}"
    variables = {"TELEGRAM_BOT_TOKEN": "1:x", "TELEGRAM_WEBHOOK_SECRET": "s", "RATE_LIMIT_KV": url}
    for name, value in {**variables, "RATE_LIMIT_MAX": "3"}.items():
        monkeypatch.setenv(name, value)

    async def write(count: int) -> None:
        kv = open_kv(url)
        settings = TelegramSettings(telegram_bot_token="1:x", telegram_webhook_secret="s", rate_limit_max=3)
        for _ in range(count):
            await user_limiter(settings, kv).hit("42")
        await kv.aclose()

    asyncio.run(write(2))
    assert said(capsys, "telegram", "inspect", "42") == "user 42: 2 of 3 messages, 1 left\n"
    asyncio.run(write(1))
    assert said(capsys, "telegram", "inspect", "42").startswith("user 42: 3 of 3 messages, 0 left; again in ")
    said(capsys, "telegram", "reset", "42")
    assert said(capsys, "telegram", "inspect", "42") == "user 42: 0 of 3 messages, 3 left\n"
    asyncio.run(write(1))
    assert said(capsys, "telegram", "purge") == "entries removed: 1\n"
    assert said(capsys, "telegram", "purge") == "entries removed: 0\n"


def test_tiers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with RedisServer() as redis:
        assert main(["tiers", "inspect", "ip:10.0.0.1"]) == 1
        assert "SAJU_REDIS_URL" in capsys.readouterr().err
        monkeypatch.setenv("SAJU_REDIS_URL", redis.url)
        said(capsys, "tiers", "keys", "create", "ada", "--tier", "plus")

        async def take() -> None:
            client = setup_rate_limiting(redis.url)
            assert client is not None
            async with client:
                for _ in range(3):
                    await TokenBucketRateLimiter(10, 0.0001, client).take("user:ada")

        asyncio.run(take())
        # Tokens come back while we look, at one a second.
        assert "user:ada: tier plus, 60 per minute, " in said(capsys, "tiers", "inspect", "user:ada")
        said(capsys, "tiers", "reset", "user:ada")
        full = "user:ada: tier plus, 60 per minute, 10 of 10 left\n"
        assert said(capsys, "tiers", "inspect", "user:ada") == full
        assert said(capsys, "tiers", "inspect", "ip:10.0.0.1").startswith(
            "ip:10.0.0.1: tier anonymous, 5 per"
        )
        assert main(["tiers", "reset", "ada"]) == 1
        assert "user:ID or ip:ADDRESS" in capsys.readouterr().err


def test_petitions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], empty_url: str
) -> None:
    submitter = uuid4()

    async def write(url: str) -> None:
        database = Database(url)
        await database.open()
        await migrate(database)
        async with database.connection() as connection:
            row = await (await connection.execute("SELECT clock_timestamp()")).fetchone()
        assert row is not None
        await PostgresRateLimitStore(database).increment_bucket(submitter, row[0])
        await PostgresRateLimitStore(database, counter="co_sign").increment_bucket(submitter, row[0])
        await database.aclose()

    monkeypatch.setenv("DATABASE_URL", empty_url)
    asyncio.run(write(empty_url))
    first, second = said(capsys, "petitions", "inspect", str(submitter)).splitlines()
    assert first.startswith("petitions: 1 of 10, 9 left, next change 20")
    assert second.startswith("co-signs: 1 of 50, 49 left")
    assert said(capsys, "petitions", "reset", str(submitter)) == "units removed: 2\n"
    assert "petitions: 0 of 10, 10 left" in said(capsys, "petitions", "inspect", str(submitter))
