"""A PostgreSQL with API keys that hangs: requests are answered all the same."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from headgate.testing.postgres_server import PostgresServer
from headgate_services.tiers import TiersSettings, create_app
from headgate_services.tiers.keys import KeyTable

pytestmark = pytest.mark.usefixtures("timeouts")

PATIENCE = 60
"""Seconds after which a test gives up; what it waits for takes far less."""


async def in_time(awaitable: Any) -> Any:
    """Return what something returns, or fail if that takes for ever."""
    return await asyncio.wait_for(awaitable, PATIENCE)


async def test_keys_that_cannot_be_looked_up_are_a_503() -> None:
    with PostgresServer() as server:
        settings = TiersSettings(database_url=server.url, saju_enable_rate_limiting=True)
        table = KeyTable(settings.database)
        await table.prepare()
        key = (await table.create("ada", "pro")).key
        await table.aclose()
        app = create_app(settings)
        transport = httpx.ASGITransport(app)
        headers = {"X-API-Key": key}
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://t", headers=headers) as client,
        ):
            assert (await client.get("/v1/whoami")).json()["user"] == "ada"
            server.pause()
            try:
                answers = await in_time(asyncio.gather(*(client.get("/v1/whoami") for _ in range(4))))
                assert [answer.status_code for answer in answers] == [503] * 4
                assert {answer.headers["retry-after"] for answer in answers} == {"1"}
            finally:
                server.resume()
            async with asyncio.timeout(PATIENCE):
                # A refusal does not wait for anything, and the probe needs its turn.
                while (answer := await client.get("/v1/whoami")).status_code == 503:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            assert answer.json()["user"] == "ada"


async def test_a_database_that_hangs_ends_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with PostgresServer() as server:
        table = KeyTable(TiersSettings(database_url=server.url).database, timeout=0.5)
        server.pause()
        try:
            with pytest.raises(Exception, match="DATABASE_URL: the server did not answer in time"):
                await in_time(table.prepare())
        finally:
            server.resume()
        await table.aclose()
