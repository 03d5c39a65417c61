"""A PostgreSQL that hangs: every request is answered, and a sent e-mail is never reported as not sent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headgate.testing.postgres_server import PostgresServer
from tests.apps.mail.conftest import Start
from tests.apps.processes import PATIENCE, in_time

pytestmark = pytest.mark.usefixtures("timeouts")


async def test_a_database_that_hangs_is_a_503_and_nothing_is_sent(
    start: Start, own_server: PostgresServer, own_url: str
) -> None:
    service = await start(database_url=own_url, global_send_rate_limit_per_minute=3)
    assert (await service.send("ann@example.com")).status_code == 201
    own_server.pause()
    answers = await in_time(asyncio.gather(*(service.send("ann@example.com") for _ in range(20))))
    assert {(answer.status_code, answer.headers["retry-after"]) for answer in answers} == {(503, "1")}
    assert answers[0].json() == {"detail": "Database unavailable; nothing was sent or stored"}
    assert len(service.provider.calls) == 1
    own_server.resume()
    async with asyncio.timeout(PATIENCE):
        # Until a probe succeeds. A probe that began before may fail later, and then an e-mail is sent but not recorded.
        while (await service.send("ann@example.com")).status_code != 201:  # noqa: ASYNC110
            await asyncio.sleep(0)
    while (await service.send("ann@example.com")).status_code != 429:
        pass
    assert len(service.provider.calls) == 3  # only what was sent was counted


async def test_what_was_sent_but_not_recorded_is_not_a_503(
    start: Start, own_server: PostgresServer, own_url: str
) -> None:
    service = await start(database_url=own_url)
    send = service.provider.send_email

    async def hang(*arguments: Any, **options: Any) -> str | None:
        own_server.pause()
        return await send(*arguments, **options)

    service.provider.send_email = hang  # type: ignore[method-assign]
    answer = await in_time(service.send("ann@example.com"))
    assert answer.status_code == 500
    assert answer.json() == {"detail": "The message was sent but could not be recorded; do not send it again"}
