"""API keys: made, listed and revoked from the command line, and looked up before the limiter runs."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy.exc import OperationalError

from headgate.errors import ConfigError
from headgate.testing import FakeClock
from headgate_server.cli import main
from headgate_services.common.databases import database_url
from headgate_services.tiers import TiersSettings, create_app
from headgate_services.tiers.authentication import ApiKeyAuthentication
from headgate_services.tiers.keys import KeyTable
from tests.apps.processes import client_of


@pytest.fixture(params=["sqlite", "postgresql"])
async def keys(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[KeyTable]:
    url = f"sqlite:///{tmp_path / 'keys.db'}"
    if request.param == "postgresql":
        url = request.getfixturevalue("empty_url")
    async with aclosing(KeyTable(database_url(url), FakeClock())) as table:
        await table.prepare()
        yield table


async def test_a_key_is_found_until_it_is_revoked(keys: KeyTable) -> None:
    created = await keys.create("ada", "pro")
    assert await keys.find(created.key) == ("ada", "pro")
    assert await keys.find(created.key[:-1] + ("A" if created.key[-1] != "A" else "B")) is None
    assert await keys.find("") is None
    assert await keys.revoke(created.id)
    assert await keys.find(created.key) is None
    assert not await keys.revoke(created.id)
    [listed] = await keys.list()
    assert listed == (created.id, "ada", "pro", 1_700_000_000_000_000, 1_700_000_000_000_000)


async def test_all_keys_of_a_user_have_the_users_tier(keys: KeyTable) -> None:
    first = await keys.create("ada")
    assert first.user.tier == "free"
    second = await keys.create("ada", "plus")
    third = await keys.create("ada")
    assert [await keys.find(made.key) for made in (first, second, third)] == [("ada", "plus")] * 3


async def test_a_key_is_stored_as_a_digest_only(tmp_path: Path) -> None:
    table = KeyTable(database_url(f"sqlite:///{tmp_path / 'keys.db'}"))
    await table.prepare()
    created = await table.create("ada")
    await table.aclose()
    with closing(sqlite3.connect(tmp_path / "keys.db")) as connection:
        dump = "\n".join(connection.iterdump())
    assert "ada" in dump
    assert created.key.removeprefix("hg_") not in dump


@pytest.mark.parametrize(
    ("user", "tier"), [("", None), ("a\nb", None), ("x" * 201, None), ("ada", "two words")]
)
async def test_names_that_cannot_be_are_refused(user: str, tier: str | None) -> None:
    with pytest.raises(ConfigError):
        await KeyTable(TiersSettings().database_url).create(user, tier)


def test_keys_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tiers", "keys", "list"]) == 0
    assert main(["tiers", "keys", "create", "ada", "--tier", "pro"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("hg_")
    assert main(["tiers", "keys", "create", "bob", "--tier", "mystery"]) == 0
    assert "Tier 'mystery' has no limit; the limit of anonymous applies." in capsys.readouterr().err
    assert main(["tiers", "keys", "list"]) == 0
    header, ada, bob = capsys.readouterr().out.splitlines()
    assert header.split() == ["KEY", "USER", "TIER", "CREATED", "REVOKED"]
    assert (ada.split()[1:3], bob.split()[1:3]) == (["ada", "pro"], ["bob", "mystery"])
    assert main(["tiers", "keys", "revoke", ada.split()[0]]) == 0
    assert main(["tiers", "keys", "revoke", ada.split()[0]]) == 1
    capsys.readouterr()
    assert main(["tiers", "keys", "list"]) == 0
    assert [line.split()[-1] == "-" for line in capsys.readouterr().out.splitlines()[1:]] == [False, True]


# --- In front of the limiter -----------------------------------------------------------------------------------------


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, KeyTable]]:
    """The service in this process, limiting in memory, and its table of keys."""
    settings = TiersSettings(
        saju_enable_rate_limiting=True,
        saju_rate_limits="anonymous=6 burst 3, free=10, pro=300",
        database_url=f"sqlite:///{tmp_path / 'keys.db'}",
    )
    app = create_app(settings, clock=FakeClock())
    keys = KeyTable(settings.database_url)
    async with client_of(app) as client:
        yield client, keys
    await keys.aclose()


@pytest.mark.requirement("S-02", "S-03")
async def test_the_tier_is_known_before_the_limiter_runs(service: tuple[httpx.AsyncClient, KeyTable]) -> None:
    client, keys = service
    ada, bob = await keys.create("ada", "pro"), await keys.create("bob", "mystery")
    answer = await client.get("/v1/whoami", headers={"X-API-Key": ada.key})
    assert answer.headers["x-ratelimit-limit"] == "300"
    assert list(answer.json().values()) == ["ada", "pro", 300, 50, 49, 1_700_000_001]
    answer = await client.get("/v1/whoami", headers={"Authorization": f"Bearer {bob.key}"})
    assert answer.json().items() >= {"user": "bob", "tier": "anonymous", "limit": 6}.items()
    assert list(answer.json()) == ["user", "tier", "limit", "capacity", "remaining", "reset"]


async def test_guessing_keys_is_limited_by_address(service: tuple[httpx.AsyncClient, KeyTable]) -> None:
    client, keys = service
    created = await keys.create("ada", "pro")
    await keys.revoke(created.id)
    guesses = [created.key.encode(), b"hg_" + b"A" * 43, b"\xff", b""]
    answers = [await client.get("/v1/whoami", headers={"X-API-Key": guess}) for guess in guesses]
    assert [answer.status_code for answer in answers] == [401, 401, 401, 429]
    assert [answer.headers["x-ratelimit-remaining"] for answer in answers] == ["2", "1", "0", "0"]


async def test_keys_that_cannot_be_looked_up_leave_a_request_anonymous(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken:
        async def find(self, key: str) -> Any:
            raise OperationalError("SELECT", {}, Exception("postgresql://ada:hunter2@db is gone"))

    seen: list[Any] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["state"])

    middleware: Any = ApiKeyAuthentication(inner, Broken())
    await middleware({"type": "http", "headers": [(b"x-api-key", b"k")]}, None, None)
    assert seen == [{"user": None, "credentials": "unchecked"}]
    assert "API keys cannot be looked up" in caplog.text
    assert "hunter2" not in caplog.text
