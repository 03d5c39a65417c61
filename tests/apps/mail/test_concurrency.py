"""Slow and parallel sends cannot pass the limit together (NL-1, NL-3)."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from tests.apps.mail.conftest import Start
from tests.apps.mail.support import Service, mail_server
from tests.apps.processes import service_process


async def send_at_once(service: Service, count: int, *, admitted: int) -> Counter[int]:
    """Send e-mails at once; all refusals must be answered before the provider replies to the admitted ones."""
    service.provider.gate.clear()
    before = len(service.provider.calls)
    sends = [asyncio.create_task(service.send()) for _ in range(count)]
    await all_answered_but(admitted, sends)
    assert len(service.provider.calls) - before <= admitted
    service.provider.gate.set()
    return Counter([(await send).status_code for send in sends])


async def all_answered_but(few: int, sends: list[asyncio.Task[httpx.Response]]) -> None:
    """Wait until at most `few` have no response; if more were admitted, that never happens."""
    pending = set(sends)
    async with asyncio.timeout(60):
        while len(pending) > few:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)


@pytest.mark.requirement("N-18", "N-33")
async def test_200_sends_at_once_with_a_slow_provider_are_10_provider_calls(start: Start) -> None:
    service = await start(global_send_rate_limit_per_minute=10)
    assert await send_at_once(service, 200, admitted=10) == {201: 10, 429: 190}
    assert len(service.provider.calls) == 10
    assert (await service.counts())["per-minute"] == 10


async def test_a_cancelled_send_stays_counted_since_nobody_knows_whether_it_went(start: Start) -> None:
    service = await start(global_send_rate_limit_per_minute=1)
    service.provider.gate.clear()
    send = asyncio.create_task(service.send())
    await service.provider.called.wait()
    send.cancel()
    with pytest.raises(asyncio.CancelledError):
        await send
    service.provider.gate.set()
    assert await service.send_many(1) == [429]
    service.clock.advance(61)
    assert await service.send_many(1) == [201]


async def test_200_sends_at_once_to_two_processes_are_10_mails_on_the_wire(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(mail_server())
        variables = {
            "GLOBAL_SEND_RATE_LIMIT_PER_HOUR": 10,
            "RATE_LIMIT_STORE": "sqlite:///limits.db",
            "EMAIL_PROVIDER": "smtp",
            "EMAIL_DOMAIN": "mail.test",
            "SMTP_HOST": "127.0.0.1",
            "SMTP_PORT": server.port,
            "SMTP_USE_TLS": "false",
        }
        processes = [
            await stack.enter_async_context(service_process("mail", tmp_path, **variables)) for _ in range(2)
        ]
        clients = [
            await stack.enter_async_context(httpx.AsyncClient(base_url=process.url, timeout=60))
            for process in processes
        ]
        created = await clients[0].post("/v1/inboxes", json={"name": "Post", "email_username": "post"})
        mail = {"inbox_id": created.json()["id"], "to": ["a@example.com"], "subject": "Hi", "body": "x"}
        server.gate.clear()
        sends = [asyncio.create_task(clients[i % 2].post("/v1/messages", json=mail)) for i in range(200)]
        await all_answered_but(10, sends)
        assert len(server.received) == 0
        server.gate.set()
        answers = [await send for send in sends]
        assert Counter(answer.status_code for answer in answers) == {201: 10, 429: 190}
        assert {answer.json()["status"] for answer in answers if answer.status_code == 201} == {"sent"}
        assert (server.tries, len(server.received)) == (10, 10)
        stored = await clients[1].get("/v1/messages", params={"inbox_id": mail["inbox_id"]})
        assert stored.json()["total"] == 10
