"""A PostgreSQL that hangs: every request is answered, and what was sent is never said not to have been."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate.testing.postgres_server import PostgresServer
from tests.apps.mail.conftest import Start
from tests.apps.mail.support import launch

pytestmark = pytest.mark.usefixtures("timeouts")

PATIENCE = 60
"""Seconds after which a test gives up; what it waits for takes far less."""


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """Provide a server that the test may stop."""
    with PostgresServer() as server:
        try:
            yield server
        finally:
            server.resume()


async def in_time(awaitable: Any) -> Any:
    """Return what something returns, or fail if that takes for ever."""
    return await asyncio.wait_for(awaitable, PATIENCE)


async def test_a_database_that_hangs_is_a_503_and_nothing_is_sent(
    start: Start, server: PostgresServer
) -> None:
    service = await start(database_url=server.url, global_send_rate_limit_per_minute=2)
    assert (await service.send("ann@example.com")).status_code == 201
    server.pause()
    answers = await in_time(asyncio.gather(*(service.send("ann@example.com") for _ in range(20))))
    assert {(answer.status_code, answer.headers["retry-after"]) for answer in answers} == {(503, "1")}
    assert answers[0].json() == {"detail": "Database unavailable; nothing was sent or stored"}
    assert len(service.provider.calls) == 1
    server.resume()
    async with asyncio.timeout(PATIENCE):
        # A refusal does not wait for anything, and the probe needs its turn. Nothing was counted either.
        while (await service.send("ann@example.com")).status_code != 201:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_what_was_sent_but_not_recorded_is_not_a_503(start: Start, server: PostgresServer) -> None:
    service = await start(database_url=server.url)
    send = service.provider.send_email

    async def hang(*arguments: Any, **options: Any) -> str | None:
        server.pause()
        return await send(*arguments, **options)

    service.provider.send_email = hang  # type: ignore[method-assign]
    answer = await in_time(service.send("ann@example.com"))
    assert answer.status_code == 500
    assert answer.json() == {"detail": "The message was sent but could not be recorded; do not send it again"}


async def test_a_database_that_hangs_ends_the_start(server: PostgresServer, tmp_path: Path) -> None:
    server.pause()
    process = await launch(tmp_path, "--port", "0", DATABASE_URL=server.url, DATABASE_TIMEOUT=1)
    _, log = await in_time(process.communicate())
    assert (process.returncode, log.decode().startswith("DATABASE_URL")) == (2, True)
