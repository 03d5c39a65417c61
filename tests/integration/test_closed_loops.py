"""An event loop that is closed during calls: no unraisable error, no coroutine that was never awaited."""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate import AsyncLimiter, concurrent, sliding_window
from headgate.http.asgi import RateLimitMiddleware
from tests.server.loopback import ThreadedServer, limiter_policy, policy_of

STORES = ("memory", "sqlite", "redis", "postgres", "server")
TURNS = (0, 1, 2, 5)


NAME = "x"
RULES = (sliding_window("100000/minute"), concurrent(10_000, lease="60s"))


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with ThreadedServer(policy_of(limiter_policy(NAME, RULES))) as server:
        yield server.url


@pytest.fixture
def limiter(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncLimiter:
    urls: dict[str, Callable[[], str]] = {
        "memory": lambda: "memory://",
        "sqlite": lambda: f"sqlite:///{tmp_path}/limits.db",
        "redis": lambda: str(request.getfixturevalue("headgate_redis_url")),
        "postgres": lambda: str(request.getfixturevalue("headgate_postgres_url")),
        "server": lambda: str(request.getfixturevalue("server_url")),
    }
    name = NAME if request.param == "server" else secrets.token_hex(8)
    return AsyncLimiter(*RULES, name=name, store=urls[request.param]())


async def wait_forever() -> None:
    await asyncio.Event().wait()


async def hold_forever(limiter: AsyncLimiter) -> None:
    async with limiter.hold("ada"):
        await wait_forever()


async def request_forever(limiter: AsyncLimiter) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await wait_forever()

    async def nothing(*_: Any) -> Any: ...

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "client": ("192.0.2.1", 1)}
    await RateLimitMiddleware(app, limiter)(scope, nothing, nothing)


@pytest.mark.parametrize("limiter", STORES, indirect=True)
@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("is_run", [True, False], ids=["asyncio.run", "close"])
def test_event_loop_ending_during_calls_logs_no_errors(
    limiter: AsyncLimiter,
    turns: int,
    is_run: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    unraisable: list[Any] = []
    tasks: set[asyncio.Future[Any]] = set()
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)

    async def begin() -> None:
        await limiter.check("ada")
        for _ in range(20):
            tasks.add(asyncio.ensure_future(hold_forever(limiter)))
            tasks.add(asyncio.ensure_future(request_forever(limiter)))
            tasks.add(asyncio.ensure_future(limiter.guard("ada")(wait_forever)()))
        for _ in range(turns):
            await asyncio.sleep(0)
        if turns == TURNS[-1]:  # some holds are taken then, and their tasks wait inside
            await limiter.hold("ada")

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if is_run:
            asyncio.run(begin())
        else:
            loop = asyncio.new_event_loop()
            loop.run_until_complete(begin())
            loop.close()
            del loop

        async def end() -> None:
            assert await limiter.hold("ada")
            await limiter.aclose()

        asyncio.run(end())
        tasks.clear()
        gc.collect()
    assert [str(one.exc_value) for one in unraisable] == []
    assert [str(one.message) for one in warned if "never awaited" in str(one.message)] == []
    assert not [record for record in caplog.records if "_drive" in record.getMessage()]
    assert not [
        record for record in caplog.records if record.name == "headgate" and record.levelno > logging.INFO
    ]
