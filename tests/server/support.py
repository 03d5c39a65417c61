"""A server in this process without a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate import HeadgateError
from headgate.clock import Clock
from headgate.policy import AsyncLivePolicy, parse_policy
from headgate.testing import FakeClock
from headgate_server import Statistics, make_app, startup
from headgate_server.app import App
from headgate_server.metrics import ServerMetrics
from headgate_server.statistics import Demo
from headgate_server.wire import Tick

POLICY = """
[limiters.login]
rules = [{ quota = "5/minute", tiers = { pro = "50/minute" } }]

[limiters.llm]
rules = [{ quota = "1000/minute", name = "tokens", kind = "sliding_log" }]

[limiters.submit]
rules = [{ quota = "3/hour", scope = "user" }, { quota = "100/day", scope = "*" }]

[limiters.bucket]
rules = ["10/s burst 20"]

[limiters."odd/näme"]
rules = ["5/minute"]
"""

READ_SECONDS = 20.0
"""How long to wait for something that must happen, before the test fails."""


class Server:
    """A server in this process.

    Attributes:
        client: Asks it.
        live: Its limiters.
        statistics: Its figures.
        clock: Its stores' time.
        app: The application.
    """

    def __init__(
        self,
        policy: str = POLICY,
        *,
        clock: Clock | None = None,
        demo: Demo | None = None,
        address: str = "http://127.0.0.1",
    ) -> None:
        self.clock = clock or FakeClock()
        self.statistics, self.metrics = Statistics(), ServerMetrics()
        self.live = AsyncLivePolicy(
            parse_policy(policy),
            hooks=[self.statistics, self.metrics.hook],
            shadow_hooks=[self.metrics.shadow_hook],
            clock=self.clock,
        )
        self.app: App = make_app(self.live, statistics=self.statistics, metrics=self.metrics, demo=demo)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, raise_app_exceptions=True), base_url=address
        )

    def tick(self, at: int) -> Tick:
        """End the current second, and return its tick."""
        return next_tick(self.statistics, self.live, at)

    async def post(self, path: str, body: object = None, **arguments: Any) -> httpx.Response:
        """Send a JSON body."""
        return await self.client.post(path, json={} if body is None else body, **arguments)

    async def answer(self, path: str, body: object = None) -> Any:
        """Send a JSON body, and return the body of the answer, which must be a success."""
        response = await self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    async def hit(self, limiter: str = "login", key: object = "alice", **more: object) -> Any:
        return await self.answer(f"/v1/limiters/{limiter}/hit", {"key": key, **more})


def next_tick(statistics: Statistics, live: AsyncLivePolicy, at: int) -> Tick:
    """End the current second of a worker, and return its tick."""
    statistics.publish(live)
    return statistics.collect(at)


@asynccontextmanager
async def started(app: App) -> AsyncIterator[None]:
    """Run an application's lifespan around a block, as a server does."""
    inbox: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    outbox: asyncio.Queue[Any] = asyncio.Queue()
    running = asyncio.ensure_future(app({"type": "lifespan"}, inbox.get, outbox.put))
    await inbox.put({"type": "lifespan.startup"})
    assert (await outbox.get())["type"] == "lifespan.startup.complete"
    try:
        yield
    finally:
        await inbox.put({"type": "lifespan.shutdown"})
        assert (await outbox.get())["type"] == "lifespan.shutdown.complete"
        await running


async def turn_until(condition: Callable[[], object]) -> None:
    """Let the event loop turn until a condition is true, for which there is no event."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


def problem(response: httpx.Response, status: int) -> str:
    """Return the detail of a problem document, which must be one and have this status."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document = response.json()
    about_a_cost = {"cost", "capacity", "rule", "unit"}
    assert document.keys() - about_a_cost == {"type", "title", "status", "detail"}
    assert document.keys() & about_a_cost in (set(), about_a_cost)
    assert document["status"] == status
    detail = document["detail"]
    assert isinstance(detail, str)
    return detail


def refusal(folder: Path, policy: str, **arguments: Any) -> str:
    """Return the reason why a server does not start; it would start in this process."""
    config = folder / "headgate.toml"
    config.write_text(policy)
    with pytest.MonkeyPatch.context() as patch:
        for start in ("run", "run_workers"):
            patch.setattr(startup, start, lambda *_: pytest.fail("it has started"))
        with pytest.raises(HeadgateError) as error:
            startup.serve(config, **arguments)
    return str(error.value)
