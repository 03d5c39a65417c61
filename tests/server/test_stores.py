"""The server over every store that a policy can name: the same answers, in order."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headgate.policy import parse_policy
from headgate.stores.postgres import migrate
from headgate.testing import FakeClock
from headgate.testing.postgres_server import new_database
from headgate.testing.servers import RedisServer
from headgate_server import kept_result
from headgate_server.kept_result import KEPT_SECONDS
from tests.server.support import Server


@pytest.fixture(params=["memory", "sqlite", "redis", "postgres"])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Server]:
    kind: str = request.param
    if kind == "memory":
        url = "memory://"
    elif kind == "sqlite":
        url = f"sqlite:///{tmp_path}/limits.db"
    else:
        url = request.getfixturevalue(f"headgate_{kind}_url")
    if kind == "postgres":
        migrate(url)
    name = secrets.token_hex(4)  # other tests count in the same servers
    # A busy machine is not what this is about.
    patience = "" if kind in ("memory", "sqlite") else "deadline = 30\n"
    policy = "".join(
        f'[limiters.{limiter}-{name}]\nrules = [{rule}]\nstore = "{url}"\n{patience}'
        for limiter, rule in {
            "window": '{ quota = "5/minute", tiers = { pro = "50/minute" } }',
            "log": '{ quota = "5/minute", kind = "sliding_log" }',
            "fixed": '{ quota = "5/minute", kind = "fixed_window" }',
            "bucket": '"1/minute burst 5"',
        }.items()
    )
    found = Server(policy, clock=FakeClock())
    yield found
    await found.live.aclose()


async def used(server: Server, key: str, tier: str | None = None) -> dict[str, tuple[int, int]]:
    answer = await server.answer("/v1/inspect", {"key": key, "tier": tier})
    assert [limiter["error"] for limiter in answer["limiters"]] == [None] * 4
    return {
        limiter["name"].partition("-")[0]: (limiter["results"][0]["used"], limiter["results"][0]["remaining"])
        for limiter in answer["limiters"]
    }


async def test_a_key_beyond_the_limit_is_seen_to_be(server: Server) -> None:
    assert set((await used(server, "alice")).values()) == {(0, 5)}
    for name in list(server.live):
        await server.answer(f"/v1/limiters/{name}/record", {"key": "alice", "cost": 8})
        await server.hit(name, "bob", cost=2)
    assert set((await used(server, "alice")).values()) == {(8, 0)}
    assert set((await used(server, "bob")).values()) == {(2, 3)}
    assert (await used(server, "alice", "pro"))["window"] == (8, 42)
    for name in list(server.live):  # and looking has changed nothing
        assert (await server.hit(name, "bob", cost=3))["remaining"] == 0
        assert not (await server.hit(name, "alice"))["allowed"]


async def test_a_batch_is_decided_in_order(server: Server) -> None:
    name = next(iter(server.live))
    calls = [{"limiter": name, "operation": "hit", "key": "carol"}] * 12
    answers = (await server.answer("/v1/batch", {"calls": calls}))["answers"]
    assert [answer["body"]["allowed"] for answer in answers] == [True] * 5 + [False] * 7


async def test_every_store_is_ready(server: Server) -> None:
    response = await server.client.get("/readyz")
    assert response.status_code == 200, response.text
    assert response.json()["status"] == "ready"


async def test_a_store_that_is_down_is_not_ready() -> None:
    down = Server('[limiters.far]\nrules = ["5/minute"]\nstore = "redis://u:secret@127.0.0.1:1/0"')
    response = await down.client.get("/readyz")
    assert response.status_code == 503
    assert response.json()["status"] == "not ready"
    [store] = response.json()["stores"]
    assert "connect" in store["reason"]
    assert "secret" not in response.text
    assert (store["limiter"], store["store"]) == ("far", "redis://***@127.0.0.1:1/0")
    assert (store["up"], store["breaker"], store["failures"]) == (False, "open", 1)
    assert (await down.client.get("/healthz")).json() == {"status": "ok"}
    await down.live.aclose()


async def test_readiness_says_since_when_and_how_quick() -> None:
    with RedisServer() as redis:
        server = Server(f'[limiters.far]\nrules = ["5/minute"]\nstore = "{redis.url}"\ndeadline = 30')
        server.tick(99)
        await server.hit("far")
        server.tick(100)
        [up] = (await server.client.get("/readyz")).json()["stores"]
        assert up["since"] is None
        assert None not in (up["last_contact"], up["p50"], up["p99"])
        redis.kill()
        await server.hit("far")
        server.tick(101)
        [down] = (await server.client.get("/readyz")).json()["stores"]
        assert down["last_contact"] == up["last_contact"] <= down["since"]
        await server.live.aclose()


async def readiness(url: str) -> dict[str, Any]:
    server = Server(f'[limiters.far]\nrules = ["5/minute"]\nstore = "{url}"\ndeadline = 30')
    response = await server.client.get("/readyz")
    await server.live.aclose()
    assert response.status_code == (200 if response.json()["status"] == "ready" else 503)
    [store] = response.json()["stores"]
    assert store["up"] is (response.status_code == 200)
    found: dict[str, Any] = store
    return found


async def test_a_database_without_our_tables_is_not_ready(headgate_postgres_server: str) -> None:
    with new_database(headgate_postgres_server) as url:
        assert "headgate migrate" in (await readiness(url))["reason"]
        migrate(url)
        assert (await readiness(url))["reason"] is None


async def test_many_readiness_requests_ask_a_store_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may send them, and each would write to the store."""
    now = 1000.0
    monkeypatch.setattr(kept_result, "monotonic", lambda: now)
    with RedisServer() as redis:
        server = Server(f'[limiters.far]\nrules = ["5/minute"]\nstore = "{redis.url}"\ndeadline = 30')
        await server.hit("far")
        await server.client.get("/readyz")
        before = scripts_and_connections(redis)
        now += KEPT_SECONDS
        responses = await asyncio.gather(*(server.client.get("/readyz") for _ in range(20)))
        responses += [await server.client.get("/readyz") for _ in range(20)]
        assert {response.status_code for response in responses} == {200}
        scripts, connections = scripts_and_connections(redis)
        assert scripts - before[0] == 1
        assert connections - before[1] == 1  # that of this second look
        await server.live.aclose()


def scripts_and_connections(redis: RedisServer) -> tuple[int, int]:
    """Return how many scripts a server has run, and how many connections it has accepted."""
    stats = redis.command("INFO", "everything")
    calls = re.findall(rb"cmdstat_evalsha?:calls=(\d+)", stats)
    accepted = re.search(rb"total_connections_received:(\d+)", stats)
    assert accepted is not None
    return sum(map(int, calls)), int(accepted[1])


async def test_readiness_is_that_of_the_policy_in_force() -> None:
    server = Server('[limiters.near]\nrules = ["5/minute"]')
    assert (await server.client.get("/readyz")).status_code == 200
    server.live._use(parse_policy('[limiters.far]\nrules = ["5/minute"]\nstore = "redis://127.0.0.1:1/0"'))
    assert (await server.client.get("/readyz")).status_code == 503
    await server.live.aclose()


async def test_a_store_that_was_down_is_ready_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_result, "KEPT_SECONDS", 0.0)
    with RedisServer() as redis:
        server = Server(f'[limiters.far]\nrules = ["5/minute"]\nstore = "{redis.url}"\ndeadline = 30')
        assert (await server.client.get("/readyz")).status_code == 200
        redis.kill()
        assert (await server.client.get("/readyz")).status_code == 503
        await asyncio.to_thread(redis.start)
        async with asyncio.timeout(60):
            while (await server.client.get("/readyz")).status_code != 200:  # noqa: ASYNC110  # as a load balancer does
                await asyncio.sleep(0.01)
        await server.live.aclose()


async def test_misconfigured_store_is_not_a_client_error() -> None:
    with RedisServer(options=("--requirepass", "s3cret")) as redis:
        server = Server(f'[limiters.far]\nrules = ["5/minute"]\nstore = "{redis.url}"\ndeadline = 30')
        response = await server.client.post("/v1/limiters/far/hit", json={"key": "alice"})
        assert response.status_code == 503
        [state] = (await server.answer("/v1/inspect", {"key": "alice"}))["limiters"]
        assert state["error"].startswith("the store cannot be reached")
        await server.live.aclose()
