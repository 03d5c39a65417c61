"""Limits of requests in flight: a place is held until the request or stream ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import Depends, FastAPI

from headgate import AsyncLimiter, ConfigError, calendar, concurrent, sliding_window
from headgate.http import asgi
from headgate.http.fastapi import install, limit
from headgate.http.headers import Writer

PLACE = concurrent(1, lease="60s", name="in flight")


def scope() -> dict[str, Any]:
    return {
        "type": "http",
        "method": "GET",
        "path": "/",
        "query_string": b"",
        "headers": [],
        "client": ("192.0.2.1", 1),
    }


async def receive() -> dict[str, Any]:
    return {"type": "http.request"}


async def statuses_of(app: Any) -> list[int]:
    sent: list[int] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            sent.append(message["status"])

    await app(scope(), receive, send)
    return sent


async def test_a_cancelled_request_frees_its_place() -> None:
    started = asyncio.Event()

    async def hang(scope: Any, receive: Any, send: Any) -> None:
        started.set()
        await asyncio.Event().wait()

    limiter = AsyncLimiter(PLACE)
    request = asyncio.ensure_future(statuses_of(asgi.RateLimitMiddleware(hang, limiter)))
    await started.wait()
    assert not await limiter.check("192.0.2.1")
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert await limiter.check("192.0.2.1")


@pytest.mark.parametrize("is_installed", [True, False])
async def test_a_dependency_with_places_needs_install(is_installed: bool) -> None:
    app = FastAPI()
    in_flight = limit(PLACE)

    @app.get("/", dependencies=[Depends(in_flight)])
    async def root() -> None:
        pass

    if is_installed:
        install(app)
        assert [await statuses_of(app) for _ in range(2)] == [[200], [200]]
    else:
        with pytest.raises(ConfigError, match="install"):
            await statuses_of(app)


async def test_cost_can_be_given_per_unit() -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    limiter = AsyncLimiter("5/minute", sliding_window("100/minute", unit="tokens"))
    app = asgi.RateLimitMiddleware(answer, limiter, cost=lambda scope: {"tokens": 60})
    assert [await statuses_of(app) for _ in range(2)] == [[200], [429]]
    assert [result.remaining for result in (await limiter.check("192.0.2.1", 0)).results] == [4, 40]
    with pytest.raises(ConfigError, match="every request costs 101"):
        asgi.RateLimitMiddleware(answer, limiter, cost={"tokens": 101})


def test_policy_field_names_the_quota_unit() -> None:
    rules = (sliding_window("9/minute", unit="tokens", name="t"), PLACE, calendar("7/month", name="m"))
    value = Writer(rules).policy(None, ['"t"', '"p"', '"m"'])
    assert value == '"t";q=9;qu="tokens";w=60, "p";q=1;qu="concurrent-requests", "m";q=7'
