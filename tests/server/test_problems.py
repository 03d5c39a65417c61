"""Errors are problem documents, never tracebacks."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from headgate.errors import StoreConflict, StoreUnavailable
from headgate_server.app import BODY_SECONDS
from headgate_server.hold_record import HoldsUnsupported
from headgate_server.holds import HoldBook
from tests.server.support import READ_SECONDS, Server, problem

HIT = "/v1/limiters/login/hit"
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"nonsense", "malformed"),
        (b"[]", "Expected `object`, got `array`"),
        (b'{"key": "a"} {}', "trailing characters"),
        (b'{"key": "a", "cost": "1"}', "at `$.cost`"),
        (b'{"key": "a", "cost": -1}', "at `$.cost`"),
        (b'{"key": "a", "cost": 1.5}', "at `$.cost`"),
        (b'{"key": "a", "cost": true}', "at `$.cost`"),
        (b'{"key": "a", "cost": null}', "at `$.cost`"),
        (b'{"key": "a", "cost": 9007199254740992}', "at `$.cost`"),
        (b'{"key": 7}', "at `$.key`"),
        (b'{"key": ["a"]}', "at `$.key`"),
        (b'{"key": {"user": 7}}', "at `$.key"),
        (b'{"key": {"user": {"name": "a"}}}', "at `$.key`"),
        (b'{"key": {"$base64": "?"}}', "at `$.key`"),
        (b'{"key": {"$base64": {"$base64": "AA=="}}}', "at `$.key`"),
        (b'{"key": "a", "tier": 1}', "at `$.tier`"),
        (b'{"key": "a", "csot": 1}', "unknown field `csot`"),
        (b'{"key": "\xff"}', "not UTF-8"),
        (b'{"key": "\\ud800"}', "cannot be used"),
    ],
)
async def test_invalid_body_error_has_its_position(body: bytes, detail: str) -> None:
    server = Server()
    assert detail in problem(await server.client.post(HIT, content=body, headers=JSON), 400)
    assert (await server.hit())["remaining"] == 4


@pytest.mark.parametrize(
    "media_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"]
)
async def test_other_bodies_than_json_are_not_read(media_type: str) -> None:
    server = Server()
    response = await server.client.post(HIT, content=b'{"key": "a"}', headers={"content-type": media_type})
    assert "application/json" in problem(response, 415)
    response = await server.client.post(HIT, content=b'{"key": "a"}')
    assert problem(response, 415)


@pytest.mark.parametrize(
    "media_type", ["application/json; charset=utf-8", "Application/JSON", "application/json ;x=y"]
)
async def test_json_may_be_spelt_in_many_ways(media_type: str) -> None:
    server = Server()
    response = await server.client.post(HIT, content=b'{"key": "a"}', headers={"content-type": media_type})
    assert response.status_code == 200


SMALL = "[limiters.login]\nrules = ['5/minute']\n[server]\nlargest_body = 1024"


async def test_a_large_body_is_refused_before_it_is_read() -> None:
    server = Server(SMALL)
    response = await server.client.post(HIT, content=b'{"key": "%b"}' % (b"x" * 1024), headers=JSON)
    assert "1024 bytes" in problem(response, 413)
    assert response.headers["connection"] == "close"
    exact = b'{"key": "%b"}' % (b"x" * (1024 - 11))
    assert len(exact) == 1024
    assert (await server.client.post(HIT, content=exact, headers=JSON)).status_code == 200


async def test_a_body_of_unknown_length_is_read_no_further_than_allowed() -> None:
    server = Server(SMALL)
    sent = 0

    async def receive() -> dict[str, Any]:
        nonlocal sent
        sent += 1
        return {"type": "http.request", "body": b"x" * 300, "more_body": True}

    answers = await called(server, receive)
    assert answers[0]["status"] == 413
    assert sent == 4


@pytest.mark.parametrize("begun", [True, False])
async def test_a_body_that_does_not_arrive_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    monkeypatch.setattr("headgate_server.app.BODY_SECONDS", 0.0)
    assert BODY_SECONDS > 0
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}] * begun)

    async def receive() -> dict[str, Any]:
        message = next(messages, None)
        if message is None:
            await asyncio.Event().wait()
        assert message is not None
        return message

    async with asyncio.timeout(READ_SECONDS):
        answers = await called(Server(), receive)
    assert answers[0]["status"] == 408


@pytest.mark.parametrize("begun", [True, False])
async def test_disconnected_client_is_not_answered(begun: bool) -> None:
    messages = iter(
        [{"type": "http.request", "body": b"{", "more_body": True}] * begun + [{"type": "http.disconnect"}]
    )

    async def receive() -> dict[str, Any]:
        return next(messages)

    assert await called(Server(), receive) == []


async def called(server: Server, receive: Any) -> list[Any]:
    """Call the application like a server, and return its messages."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": HIT,
        "headers": headers,
        "server": ("127.0.0.1", 8080),
    }
    await server.app(scope, receive, send)
    return sent


async def test_unknown_limiter_error_suggests_similar_names() -> None:
    server = Server()
    assert "did you mean 'login'?" in problem(await server.post("/v1/limiters/lgoin/hit"), 404)
    assert "GET /v1/limiters" in problem(await server.post("/v1/limiters/zzz/hold"), 404)
    assert problem(await server.client.get("/v1/limiters/zzz"), 404)


@pytest.mark.parametrize(
    "path", ["/nowhere", "/v1", "/v1/limiters/login/hit/", "/v1//hit", "/static/", "/v1/holds/x"]
)
async def test_an_unknown_path_is_unknown(path: str) -> None:
    assert "/openapi.json" in problem(await Server().client.get(path), 404) or path == "/static/"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", HIT, "POST"),
        ("PUT", HIT, "POST"),
        ("OPTIONS", HIT, "POST"),
        ("POST", "/v1/limiters", "GET, HEAD"),
        ("DELETE", "/v1/limiters/login", "GET, HEAD"),
        ("POST", "/healthz", "GET, HEAD"),
    ],
)
async def test_wrong_method_lists_allowed_methods(method: str, path: str, allowed: str) -> None:
    response = await Server().client.request(method, path)
    assert allowed in problem(response, 405)
    assert response.headers["allow"] == allowed


@pytest.mark.parametrize(
    ("limiter", "body", "detail"),
    [
        ("login", {"key": "a", "cost": 6}, "a cost of 6 can never be admitted"),
        ("login", {}, "a key is missing"),
        ("login", {"key": {"user": "a"}}, "not a mapping"),
        ("submit", {"key": "a"}, "the key is a mapping"),
        ("submit", {"key": {"realm": "a"}}, "no entry for 'user'"),
        ("submit", {"key": {}}, "no entry for 'user'"),
        ("submit", {"key": {"user": "a", "other": "b"}}, "no rule counts by 'other'"),
    ],
)
@pytest.mark.parametrize("operation", ["hit", "hold"])
async def test_cost_above_capacity_is_unprocessable(
    limiter: str, body: object, detail: str, operation: str
) -> None:
    assert detail in problem(await Server().post(f"/v1/limiters/{limiter}/{operation}", body), 422)


async def test_settling_at_an_impossible_cost_is_not_processed() -> None:
    server = Server("[limiters.b]\nrules = ['1/s burst 5']")
    held = await server.answer("/v1/limiters/b/hold", {"key": "a"})
    settle = f"/v1/holds/{held['hold']}/settle"
    assert problem(await server.post(settle, {"cost": 9007199254740991}), 422)
    assert (await server.answer(settle, {"cost": 0}))["first"]  # nothing stands yet
    assert (await server.answer("/v1/limiters/b/check", {"key": "a", "cost": 5}))["allowed"]


async def test_a_store_without_memory_for_holds_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def take(*_: object, **options: object) -> None:
        raise HoldsUnsupported("the store cannot keep holds")

    monkeypatch.setattr(HoldBook, "take", take)
    assert "cannot keep holds" in problem(await Server().post("/v1/limiters/login/hold", {"key": "a"}), 501)


@pytest.mark.parametrize(
    "error",
    [
        StoreUnavailable("redis://ada:s3cret@db: connection refused"),
        StoreConflict("what is there is not ours"),
    ],
)
async def test_a_store_that_fails_where_no_policy_helps_is_unavailable(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()

    async def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(type(server.live["login"]), "reset", fail)
    response = await server.post("/v1/limiters/login/reset", {"key": "a"})
    assert "s3cret" not in problem(response, 503)
    assert response.headers["retry-after"] == "1"


async def test_unexpected_error_is_logged_and_hidden(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server()

    async def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a secret detail")

    monkeypatch.setattr(server.live["login"].gate, "decide", fail)
    with caplog.at_level(logging.ERROR):
        detail = problem(await server.post(HIT, {"key": "a"}), 500)
        batch = await server.answer(
            "/v1/batch", {"calls": [{"operation": "hit", "limiter": "login", "key": "a"}]}
        )
    assert "secret" not in detail
    assert batch["answers"][0]["body"]["detail"] == detail
    assert caplog.text.count("RuntimeError: a secret detail") == 2


async def test_websockets_are_turned_away() -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await Server().app({"type": "websocket"}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]
