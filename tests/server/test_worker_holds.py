"""Holds of several workers on a shared store: racing calls, and a killed worker."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.support import READ_SECONDS, Process, serving

POLICY = """
[store]
url = "{url}"
[limiters.llm]
{patience}
rules = [
  {{ quota = "100000/hour", name = "tokens" }},
  {{ kind = "concurrent", quota = 100, lease = "1h", name = "in flight" }},
]
"""


@pytest.fixture(params=["sqlite", "redis", "postgres"])
def policy(request: pytest.FixtureRequest) -> str:
    if request.param == "sqlite":
        return POLICY.format(url="sqlite:///limits.db", patience="")
    # A busy machine is not what this is about.
    url = request.getfixturevalue(f"headgate_{request.param}_url")
    return POLICY.format(url=url, patience="deadline = 30")


def client_of(server: Process) -> httpx.AsyncClient:
    """Return a client that opens a connection for each request, so that the workers share them."""
    limits = httpx.Limits(max_connections=16, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=server.url, limits=limits, timeout=READ_SECONDS)


async def take(client: httpx.AsyncClient, key: str, cost: int) -> str:
    answer = await client.post("/v1/limiters/llm/hold", json={"key": key, "cost": {"requests": cost}})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["hold"])


async def used(client: httpx.AsyncClient, key: str) -> list[int]:
    answer = await client.post("/v1/inspect", json={"key": key})
    return [result["used"] for result in answer.json()["limiters"][0]["results"]]


def test_concurrent_confirms_and_renewals_of_workers_move_units_once(tmp_path: Path, policy: str) -> None:
    async def race(server: Process) -> None:
        async with client_of(server) as client:
            for number in range(5):
                key = f"user {number}"
                confirmed, renewed = await take(client, key, 1), await take(client, key, 1)
                calls = [client.post(f"/v1/holds/{confirmed}/confirm", json={}) for _ in range(6)]
                calls += [client.post(f"/v1/holds/{renewed}/renew", json={}) for _ in range(6)]
                answers = await asyncio.gather(*calls)
                assert [answer.status_code for answer in answers] == [200] * 12
                assert all(answer.json()["allowed"] for answer in answers[:6])
                assert all(answer.json()["decision"]["allowed"] for answer in answers[6:])
                assert await used(client, key) == [2, 1]

    with serving(tmp_path, policy, workers=2) as server:
        asyncio.run(race(server))


async def confirmed(client: httpx.AsyncClient, hold: str) -> tuple[int, Any]:
    """Confirm a hold; the status is 0 if the connection was lost."""
    try:
        answer = await client.post(f"/v1/holds/{hold}/confirm", json={})
    except httpx.TransportError:
        return 0, None
    return answer.status_code, answer.json()


def test_confirming_units_of_a_killed_worker_stay_counted(tmp_path: Path, policy: str) -> None:
    async def confirm_and_kill(server: Process) -> None:
        async with client_of(server) as client:
            holds = [await take(client, "alice", 1) for _ in range(40)]
            assert await used(client, "alice") == [40, 40]
            calls = [asyncio.ensure_future(confirmed(client, hold)) for hold in holds]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            os.kill(server.workers[0], signal.SIGKILL)
            first = await asyncio.gather(*calls)
            assert {status for status, _ in first} <= {0, 200}
            lost = [hold for hold, (status, _) in zip(holds, first, strict=True) if status == 0]
            again = await asyncio.gather(*(confirmed(client, hold) for hold in lost))
            assert {status for status, _ in again} <= {200, 409}
            tokens, places = await used(client, "alice")
            assert tokens == 40  # none is gone, none counts twice
            assert places <= sum(status == 409 for status, _ in again)

    with serving(tmp_path, policy, workers=2) as server:
        asyncio.run(confirm_and_kill(server))
