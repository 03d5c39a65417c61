"""A PostgreSQL with API keys that hangs: requests are still answered."""

from __future__ import annotations

import asyncio

import pytest

from headgate import ConfigError
from headgate.testing.postgres_server import PostgresServer
from headgate_services.common.databases import database_url
from headgate_services.tiers import TiersSettings, create_app
from headgate_services.tiers.keys import KeyTable
from tests.apps.processes import PATIENCE, client_of, in_time

pytestmark = pytest.mark.usefixtures("timeouts")


async def test_keys_that_cannot_be_looked_up_are_a_503(own_server: PostgresServer, own_url: str) -> None:
    settings = TiersSettings(database_url=own_url, saju_enable_rate_limiting=True)
    table = KeyTable(settings.database_url)
    await table.prepare()
    key = (await table.create("ada", "pro")).key
    await table.aclose()
    async with client_of(create_app(settings), headers={"X-API-Key": key}) as client:
        assert (await client.get("/v1/whoami")).json()["user"] == "ada"
        own_server.pause()
        answers = await in_time(asyncio.gather(*(client.get("/v1/whoami") for _ in range(4))))
        assert [(answer.status_code, answer.headers["retry-after"]) for answer in answers] == [(503, "1")] * 4
        own_server.resume()
        async with asyncio.timeout(PATIENCE):
            while (answer := await client.get("/v1/whoami")).status_code == 503:  # noqa: ASYNC110  # until a probe succeeds
                await asyncio.sleep(0)
        assert answer.json()["user"] == "ada"


async def test_a_database_that_hangs_ends_a_command(own_server: PostgresServer, own_url: str) -> None:
    table = KeyTable(database_url(own_url), timeout=0.5)
    own_server.pause()
    with pytest.raises(ConfigError, match="DATABASE_URL: the server did not answer in time"):
        await in_time(table.prepare())
    await table.aclose()
