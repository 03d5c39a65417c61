"""Every operation on limiters and holds, over HTTP."""

from __future__ import annotations

import asyncio
import base64
from hashlib import sha256
from itertools import count

import pytest

from headgate.testing import FakeClock
from headgate_server import operations
from headgate_server.wire import key_from
from tests.server.support import Server, problem


async def test_hit_returns_the_whole_decision() -> None:
    server = Server()
    assert await server.hit() == {
        "allowed": True,
        "limit": 5,
        "remaining": 4,
        "retry_after": None,
        "reset_after": 60 + 1,
        "rule": "per-minute",
        "denied_by": None,
        "degraded": False,
        "results": [
            {
                "name": "per-minute",
                "allowed": True,
                "limit": 5,
                "remaining": 4,
                "retry_after": None,
                "reset_after": 61,
            }
        ],
    }


async def test_empty_body_uses_defaults() -> None:
    server = Server('[limiters.all]\nrules = [{ quota = "2/minute", scope = "*" }]')
    assert (await server.answer("/v1/limiters/all/hit"))["remaining"] == 1
    assert (await server.answer("/v1/limiters/all/hit", {"key": None, "cost": 1, "tier": None}))[
        "remaining"
    ] == 0


LONG = "é" * 300  # 600 bytes


@pytest.mark.parametrize(
    ("key", "kept"),
    [
        ("é" * 256, "é" * 256),
        (LONG, "sha256:" + sha256(LONG.encode()).hexdigest()),
        (
            {"$base64": base64.b64encode(LONG.encode()).decode()},
            b"sha256:" + sha256(LONG.encode()).hexdigest().encode(),
        ),
    ],
)
async def test_a_long_key_is_kept_as_its_digest(key: object, kept: object) -> None:
    assert key_from(key) == kept  # type: ignore[arg-type]
    assert key_from({"user": key}) == {"user": kept}  # type: ignore[dict-item]
    server = Server()
    await server.hit("login", key, cost=5)
    assert not (await server.hit("login", key))["allowed"]
    assert (await server.hit("login", "é" * 301))["allowed"]


async def test_a_tier_has_a_longest_name() -> None:
    server = Server()
    answer = await server.post("/v1/limiters/login/hit", {"key": "alice", "tier": "t" * 201})
    assert "length <= 200" in problem(answer, 400)


async def test_a_hint_says_how_long_to_wait() -> None:
    server = Server()
    path = "/v1/limiters/login/wait-hint"
    assert await server.answer(path, {"key": "alice"}) == {"allowed": True, "wait": 0}
    await server.hit(cost=5)
    assert await server.answer(path, {"key": "alice"}) == {"allowed": False, "wait": 61}
    never = Server('[limiters.shut]\nrules = ["0/minute"]')
    assert await never.answer("/v1/limiters/shut/wait-hint", {"key": "a"}) == {"allowed": False, "wait": None}


async def test_a_hold_is_settled_once_and_gives_back_the_rest() -> None:
    server = Server()
    held = await server.answer("/v1/limiters/llm/hold", {"key": "alice", "cost": 800})
    assert held["decision"]["remaining"] == 200
    assert held["expires_after"] == 60
    path = f"/v1/holds/{held['hold']}"
    first = await server.answer(f"{path}/settle", {"cost": 300})
    assert first == {
        "hold": held["hold"],
        "limiter": "llm",
        "held": 800,
        "cost": 300,
        "first": True,
        "degraded": False,
    }
    assert (await server.hit("llm", cost=0))["remaining"] == 700
    assert await server.answer(f"{path}/settle", {"cost": 5}) == {**first, "first": False}
    assert await server.answer(f"{path}/release") == {**first, "first": False}
    assert (await server.hit("llm", cost=0))["remaining"] == 700


async def test_names_may_be_odd() -> None:
    server = Server()
    assert (await server.answer("/v1/limiters/odd%2Fn%C3%A4me/hit", {"key": "a"}))["allowed"]
    assert problem(await server.post("/v1/limiters/odd/n%C3%A4me/hit", {"key": "a"}), 404)


async def test_limiters_are_listed_without_credentials() -> None:
    server = Server(
        """
        [limiters.api]
        rules = [
          { quota = "100/hour", name = "hourly", tiers = { pro = "1000/hour" } },
          { quota = "10/s burst 20", scope = "*", name = "burst", kind = "token_bucket" },
        ]
        default_tier = "free"
        on_store_error = { local = 0.25 }
        store = "redis://ada:s3cret@127.0.0.1:1/0"
        headers = "ietf"
        [[limiters.api.overrides]]
        key = "alice"
        rules = { hourly = "5000/hour" }
        """.replace('scope = "*", ', "")
    )
    (limiter,) = (await server.client.get("/v1/limiters")).json()["limiters"]
    assert limiter == (await server.client.get("/v1/limiters/api")).json()
    assert limiter["store"] == "redis://***@127.0.0.1:1/0"
    assert (limiter["on_store_error"], limiter["default_tier"], limiter["headers"]) == (
        {"local": 0.25},
        "free",
        "ietf",
    )
    hourly, burst = limiter["rules"]
    assert hourly == {
        "name": "hourly",
        "kind": "sliding_window",
        "quota": "100/hour",
        "limit": 100,
        "period": 3600,
        "burst": None,
        "scope": None,
        "tiers": {"pro": "1000/hour"},
        "strict": True,
        "buckets": 60,
        "words": "at most 100 in any hour for each key",
        "unit": "requests",
        "lease": None,
        "timezone": None,
        "growth": None,
        "longest": None,
        "toml": '{ quota = "100/hour", name = "hourly", tiers = { pro = "1000/hour" } }',
        "source": "policy:4",
    }
    assert (burst["burst"], burst["quota"], burst["period"]) == (20, "10/second burst 20", 1)


# Inspecting a key


async def inspected(server: Server, key: object, **more: object) -> dict[str, dict[str, object]]:
    answer = await server.answer("/v1/inspect", {"key": key, **more})
    return {limiter["name"]: limiter for limiter in answer["limiters"]}


async def test_text_key_applies_to_every_scope() -> None:
    server = Server()
    await server.hit("submit", {"user": "42"}, cost=2)
    found = await inspected(server, "42")
    about = {"kind": "sliding_window", "unit": "requests", "timezone": None, "shadow": False}
    assert found["submit"] == {
        "name": "submit",
        "error": None,
        "results": [
            {
                "name": "per-hour-user",
                "limit": 3,
                "used": 2,
                "remaining": 1,
                "reset_after": 3660.0 - server.clock.now_us() % 60_000_000 / 1_000_000,
                "frees_after": 0,
                "scope": "user",
                **about,
            },
            {
                "name": "per-day-shared",
                "limit": 100,
                "used": 2,
                "remaining": 98,
                "reset_after": found["submit"]["results"][1]["reset_after"],  # type: ignore[index]
                "frees_after": 0,
                "scope": "*",
                **about,
            },
        ],
    }


async def test_inspect_reports_limiters_that_a_key_does_not_fit() -> None:
    server = Server()
    found = await inspected(server, {"user": "42", "realm": "north"})
    assert found["submit"]["error"] is None
    assert "no scope" in str(found["login"]["error"])
    assert found["login"]["results"] == []


async def test_inspect_shows_a_draining_bucket() -> None:
    clock = FakeClock()
    server = Server(clock=clock)
    await server.answer("/v1/limiters/bucket/record", {"key": "alice", "cost": 25})
    (state,) = (await inspected(server, "alice"))["bucket"]["results"]  # type: ignore[misc]
    assert (state["used"], state["limit"], state["remaining"], state["frees_after"]) == (25, 20, 0, 0.6)
    clock.advance(0.6)
    (state,) = (await inspected(server, "alice"))["bucket"]["results"]  # type: ignore[misc]
    assert (state["used"], state["remaining"], state["frees_after"]) == (19, 1, 0)


async def test_inspect_applies_tier_and_override() -> None:
    server = Server(
        """
        [limiters.api]
        rules = [{ quota = "5/minute", name = "few", tiers = { pro = "50/minute" } }]
        [[limiters.api.overrides]]
        key = "alice"
        rules = { few = "7/minute" }
        """
    )
    limits = {
        (key, tier): (await inspected(server, key, tier=tier))["api"]["results"][0]["limit"]  # type: ignore[index]
        for key, tier in (("bob", None), ("bob", "pro"), ("alice", None))
    }
    assert limits == {("bob", None): 5, ("bob", "pro"): 50, ("alice", None): 7}


async def test_limit_0_has_no_waiting_time() -> None:
    server = Server('[limiters.shut]\nrules = ["0/minute"]')
    (state,) = (await inspected(server, "a"))["shut"]["results"]  # type: ignore[misc]
    assert (state["limit"], state["used"], state["frees_after"]) == (0, 0, None)


async def test_inspect_reports_a_store_that_is_down() -> None:
    server = Server(
        '[limiters.far]\nrules = ["5/minute"]\nstore = "redis://u:secret@127.0.0.1:1/0"\n'
        '[limiters.near]\nrules = ["5/minute"]'
    )
    found = await inspected(server, "alice")
    assert found["near"]["error"] is None
    assert "cannot be reached" in str(found["far"]["error"])
    await server.live.aclose()


# Batches


async def test_a_batch_is_answered_in_order() -> None:
    server = Server()
    held = await server.answer("/v1/limiters/llm/hold", {"key": "alice", "cost": 1000})
    calls = [
        {"limiter": "llm", "operation": "hit", "key": "alice", "cost": 1},
        {"hold": held["hold"], "operation": "settle", "cost": 999},
        {"limiter": "llm", "operation": "hit", "key": "alice", "cost": 1},
        {"limiter": "llm", "operation": "hit", "key": "alice", "cost": 1},
        {"limiter": "llm", "operation": "reset", "key": "alice"},
        {"limiter": "llm", "operation": "check", "key": "alice", "cost": 1000},
        {"limiter": "llm", "operation": "wait-hint", "key": "alice"},
        {"limiter": "llm", "operation": "record", "key": "alice", "cost": 7},
        {"limiter": "llm", "operation": "hold", "key": "alice", "cost": 3},
        {"hold": held["hold"], "operation": "release"},
    ]
    answers = (await server.answer("/v1/batch", {"calls": calls}))["answers"]
    assert [answer["status"] for answer in answers] == [200] * 10
    bodies = [answer["body"] for answer in answers]
    assert [bodies[i]["allowed"] for i in (0, 2, 3, 5, 6)] == [False, True, False, True, True]
    assert bodies[1]["first"]
    assert bodies[4] == {"reset": True}
    assert bodies[7] == {"recorded": 7, "degraded": False}
    assert bodies[8]["decision"]["remaining"] == 990
    assert (bodies[9]["first"], bodies[9]["cost"]) == (False, 999)


@pytest.mark.parametrize(
    ("call", "status", "detail"),
    [
        ({"operation": "hit", "limiter": "nobody"}, 404, "no limiter"),
        ({"operation": "hit", "limiter": "login", "key": "a", "cost": 6}, 422, "never be admitted"),
        ({"operation": "hit", "limiter": "login"}, 422, "key is missing"),
        ({"operation": "hit", "hold": "x"}, 400, "name of a limiter"),
        ({"operation": "hit"}, 400, "name of a limiter"),
        ({"operation": "settle", "limiter": "login", "cost": 1}, 400, "id of a hold"),
        ({"operation": "settle", "hold": "x"}, 400, "needs a cost"),
        ({"operation": "release", "hold": "x", "cost": 1}, 400, "do not take one"),
        ({"operation": "release", "hold": "x"}, 404, "hold"),
        ({"operation": "reset", "limiter": "login", "key": "a", "cost": 1}, 400, "not a cost, tier or quota"),
    ],
)
async def test_invalid_call_does_not_affect_the_batch(call: object, status: int, detail: str) -> None:
    server = Server()
    good = {"operation": "hit", "limiter": "login", "key": "alice"}
    first, bad, last = (await server.answer("/v1/batch", {"calls": [good, call, good]}))["answers"]
    assert (first["status"], last["status"], last["body"]["remaining"]) == (200, 200, 3)
    assert (bad["status"], bad["body"]["status"]) == (status, status)
    assert detail in bad["body"]["detail"]


async def test_long_batch_yields_to_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is taken for a millisecond of work."""
    milliseconds = count()
    monkeypatch.setattr(operations, "perf_counter", lambda: next(milliseconds) / 1000)
    server, others = Server(), 0

    async def ask_again_and_again() -> None:
        nonlocal others
        while True:
            others += 1
            await asyncio.sleep(0)

    asking = asyncio.ensure_future(ask_again_and_again())
    calls = [{"limiter": "llm", "operation": "hold", "key": "a"}] * 900
    answers = await server.answer("/v1/batch", {"calls": calls + [{**calls[0], "operation": "hit"}] * 100})
    asking.cancel()
    assert [answer["status"] for answer in answers["answers"]] == [200] * 1000
    assert others > 300


async def test_a_batch_is_bounded() -> None:
    server = Server("[limiters.login]\nrules = ['5/minute']\n[server]\nlargest_body = 1000000")
    calls = [{"operation": "check", "limiter": "login", "key": "a"}] * 1001
    assert "1000" in problem(await server.post("/v1/batch", {"calls": calls}), 400)
    assert len((await server.answer("/v1/batch", {"calls": calls[1:]}))["answers"]) == 1000
    assert (await server.answer("/v1/batch", {"calls": []})) == {"answers": []}


async def test_batch_does_not_search_similar_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search takes time that grows with both lists of names and blocks other requests."""
    monkeypatch.setattr(
        "headgate_server.operations.get_close_matches", lambda *_, **__: pytest.fail("it looks")
    )
    calls = [{"limiter": "lgoin", "operation": operation} for operation in ("hit", "hold", "reset")]
    answers = (await Server().answer("/v1/batch", {"calls": calls}))["answers"]
    assert [answer["status"] for answer in answers] == [404] * 3
    assert answers[0]["body"]["detail"] == "there is no limiter 'lgoin'; GET /v1/limiters lists them all"
