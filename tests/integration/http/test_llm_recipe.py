"""The recipe of docs/how-to/llm.md, against a server that enforces the same limits: it never has to answer 429."""

from __future__ import annotations

import asyncio
import json
import random
from math import inf
from typing import Any

import httpx

from headgate import AsyncLimiter, Rule, calendar, concurrent, sliding_log, sliding_window
from headgate.testing import FakeClock

CALLS = 60
MOST_TOKENS = 900


def limits(minute: Any) -> tuple[Rule, ...]:
    return (
        minute("12/minute", name="requests per minute"),
        minute("5000/minute", unit="tokens", name="tokens per minute"),
        calendar("40/day", name="requests per day"),
        concurrent(3, lease="60s", name="in flight"),
    )


class Provider:
    """A model server with limits that are exact to the microsecond."""

    def __init__(self, clock: FakeClock) -> None:
        self._limiter = AsyncLimiter(*limits(sliding_log), clock=clock)
        self._random = random.Random(15)
        self.statuses: list[int] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        asked = json.loads((await receive())["body"])
        hold = await self._limiter.hold("caller", {"tokens": asked["max_tokens"]})
        status, usage = 429, 0
        if hold:
            for _ in range(self._random.randrange(5)):
                await asyncio.sleep(0)  # other tasks run
            status, usage = 200, self._random.randrange(1, asked["max_tokens"] + 1)
            await hold.settle({"tokens": usage})
        self.statuses.append(status)
        await send({"type": "http.response.start", "status": status, "headers": []})
        body = json.dumps({"usage": {"total_tokens": usage}}).encode()
        await send({"type": "http.response.body", "body": body})


async def call_concurrently(model: AsyncLimiter | None, clock: FakeClock) -> list[int]:
    """Make all calls from several tasks, each as soon as the limiter admits it; return the responses."""
    provider = Provider(clock)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(provider), base_url="http://model")
    open_calls = iter(range(CALLS))

    async def work() -> None:
        for _ in open_calls:
            if model is None:
                await client.post("/", json={"max_tokens": MOST_TOKENS})
                continue
            async with model.hold("gpt", {"tokens": MOST_TOKENS}, timeout=inf) as hold:
                answer = (await client.post("/", json={"max_tokens": MOST_TOKENS})).json()
                await hold.settle({"tokens": answer["usage"]["total_tokens"]})

    await asyncio.gather(*(work() for _ in range(5)))
    await client.aclose()
    return provider.statuses


async def test_provider_never_answers_429_with_the_limiter() -> None:
    clock = FakeClock()
    assert await call_concurrently(AsyncLimiter(*limits(sliding_window), clock=clock), clock) == [200] * CALLS


async def test_provider_answers_429_without_the_limiter() -> None:
    assert 429 in await call_concurrently(None, FakeClock())
