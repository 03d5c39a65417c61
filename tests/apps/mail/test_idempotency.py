"""`Idempotency-Key`: a repeated request is answered again and sent once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate_services.mail.providers import ProviderError
from tests.apps.mail.conftest import Start
from tests.apps.mail.support import Service, running


async def post(service: Service, key: str = "k", **fields: Any) -> httpx.Response:
    return await service.client.post(
        "/v1/messages", json=service.mail(**fields), headers={"Idempotency-Key": key}
    )


async def test_a_repeated_request_is_answered_again_and_sent_once(start: Start) -> None:
    service = await start(global_send_rate_limit_per_minute=5)
    first, second = await post(service), await post(service)
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.json() == second.json()
    assert "idempotency-replayed" not in first.headers
    assert second.headers["idempotency-replayed"] == "true"
    assert len(service.provider.calls) == 1
    assert (await service.messages())["total"] == 1
    assert (await service.counts())["per-minute"] == 1


async def test_a_key_of_another_request_is_refused(start: Start) -> None:
    service = await start()
    await post(service)
    assert (await post(service, subject="Another")).status_code == 422
    assert len(service.provider.calls) == 1


async def test_a_request_under_way_is_a_conflict(start: Start) -> None:
    service = await start()
    service.provider.gate.clear()
    first = asyncio.create_task(post(service))
    await service.provider.called.wait()
    assert (await post(service)).status_code == 409
    service.provider.gate.set()
    assert (await first).status_code == 201
    assert (await post(service)).headers["idempotency-replayed"] == "true"


async def test_a_send_that_failed_or_was_refused_can_be_tried_again(start: Start) -> None:
    service = await start(global_send_rate_limit_per_minute=1)
    service.provider.error = ProviderError("down")
    assert (await post(service)).json()["status"] == "failed"
    service.provider.error = None
    assert (await post(service)).json()["status"] == "sent"
    assert (await post(service, "other")).status_code == 429
    service.clock.advance(61)
    assert (await post(service, "other")).status_code == 201


async def test_a_request_that_was_interrupted_is_not_sent_again(start: Start) -> None:
    """The outcome of the send is unknown."""
    service = await start()
    service.provider.gate.clear()
    first = asyncio.create_task(post(service))
    await service.provider.called.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    answer = await post(service)
    assert (answer.status_code, "may have been sent" in answer.text) == (409, True)
    assert len(service.provider.calls) == 1


async def test_a_key_is_remembered_for_a_day_and_over_a_restart(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'mail.db'}"
    async with running(database_url=url) as service:
        first = (await post(service)).json()
    async with running(database_url=url) as service:
        assert (await post(service)).json() == first
        service.clock.advance(24 * 3600)
        assert (await post(service)).json()["id"] != first["id"]


async def test_of_many_at_once_one_is_sent_on_postgresql(start: Start, empty_url: str) -> None:
    service = await start(database_url=empty_url)
    answers = await asyncio.gather(*(post(service) for _ in range(10)))
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert len(service.provider.calls) == 1


@pytest.mark.parametrize("key", ["", "two words", "x" * 256])
async def test_a_key_that_is_none_is_refused(start: Start, key: str) -> None:
    service = await start()
    assert (await post(service, key)).status_code == 422
