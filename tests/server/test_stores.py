"""The server over every store that a policy can name: the same answers, in order."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headgate.stores.postgres import migrate
from headgate.testing import FakeClock
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
    patience = (
        "" if kind in ("memory", "sqlite") else "deadline = 30\n"
    )  # a busy machine is not what this is about
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


async def test_a_hold_is_taken_and_settled(server: Server) -> None:
    for name in list(server.live):
        held = await server.answer(f"/v1/limiters/{name}/hold", {"key": "dave", "cost": 4})
        assert held["decision"]["remaining"] == 1
        settled = await server.answer(f"/v1/holds/{held['hold']}/settle", {"cost": 1})
        assert (settled["limiter"], settled["held"], settled["cost"], settled["first"]) == (name, 4, 1, True)
        assert not (await server.answer(f"/v1/holds/{held['hold']}/release"))["first"]
    assert set((await used(server, "dave")).values()) == {(1, 4)}


async def test_every_store_is_ready(server: Server) -> None:
    response = await server.client.get("/readyz")
    assert response.status_code == 200, response.text
    assert response.json()["status"] == "ready"


async def test_a_store_that_is_down_is_not_ready() -> None:
    down = Server('[limiters.far]\nrules = ["5/minute"]\nstore = "redis://u:secret@127.0.0.1:1/0"')
    response = await down.client.get("/readyz")
    assert response.status_code == 503
    readiness = response.json()
    assert readiness["status"] == "not ready"
    (store,) = readiness["stores"]
    assert (store["limiter"], store["store"]) == ("far", "redis://***@127.0.0.1:1/0")
    assert (store["up"], store["breaker"], store["failures"]) == (False, "open", 1)
    assert "127.0.0.1" in store["error"]
    assert "secret" not in response.text
    assert (await down.client.get("/healthz")).json() == {"status": "ok"}
    await down.live.aclose()
