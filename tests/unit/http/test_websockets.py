"""Limits for the messages of WebSockets."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

from headgate import AsyncLimiter, ConfigError, Decision, concurrent, sliding_window
from headgate.http import by_header
from headgate.http.websockets import MessageLimit
from headgate.testing import FakeClock


def limiter(rule: Any = "3/minute", clock: FakeClock | None = None) -> AsyncLimiter:
    return AsyncLimiter(rule, clock=clock or FakeClock())


def echo(limit: MessageLimit | None) -> Starlette:
    async def chat(websocket: WebSocket) -> None:
        await websocket.accept()
        async for text in websocket.iter_text():
            if limit is None or await limit.message(websocket):
                await websocket.send_text(text)
            elif websocket.application_state.name == "DISCONNECTED":
                break

    return Starlette(routes=[WebSocketRoute("/", chat)])


async def talk(app: Any, messages: int, headers: dict[str, str] | None = None) -> list[Any]:
    """Send messages and return the answers; the last one may be a close code."""
    fields = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {
        "type": "websocket",
        "path": "/",
        "headers": fields,
        "query_string": b"",
        "client": ("192.0.2.1", 1),
        "subprotocols": [],
    }
    coming: list[dict[str, Any]] = [{"type": "websocket.connect"}]
    coming += [{"type": "websocket.receive", "text": str(number)} for number in range(messages)]
    coming.append({"type": "websocket.disconnect", "code": 1000})
    answers: list[Any] = []

    async def receive() -> dict[str, Any]:
        return coming.pop(0)

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "websocket.send":
            answers.append(message["text"])
        elif message["type"] == "websocket.close":
            answers.append((message["code"], message["reason"]))

    await app(scope, receive, send)
    return answers


@pytest.mark.parametrize("wrapped", [False, True])
async def test_refused_message_closes_the_connection(wrapped: bool) -> None:
    limit = MessageLimit(limiter())
    app: Any = limit.wrap(echo(None)) if wrapped else echo(limit)
    assert await talk(app, 5) == ["0", "1", "2", (1008, "Too many messages")]


async def test_connections_of_a_client_count_together_and_time_gives_room() -> None:
    clock = FakeClock()
    app = echo(MessageLimit(limiter(clock=clock), code=4029, reason="slowly"))
    assert await talk(app, 2) == ["0", "1"]
    assert await talk(app, 2) == ["0", (4029, "slowly")]
    clock.advance(61)
    assert await talk(app, 1) == ["0"]


async def test_key_is_a_function_of_the_scope() -> None:
    app = echo(MessageLimit(limiter("1/minute"), key=by_header("x-user")))
    assert await talk(app, 2, {"x-user": "a"}) == ["0", (1008, "Too many messages")]
    assert await talk(app, 1, {"x-user": "b"}) == ["0"]


async def test_callback_answers_instead_of_closing() -> None:
    async def answer(websocket: WebSocket, decision: Decision) -> None:
        await websocket.send_text(f"wait {decision.retry_after:.0f}")

    assert await talk(echo(MessageLimit(limiter(), on_refusal=answer)), 5) == [
        "0",
        "1",
        "2",
        "wait 61",
        "wait 61",
    ]


async def test_callback_of_a_wrapped_application_gets_send_and_the_message_is_dropped() -> None:
    async def answer(send: Any, decision: Decision) -> None:
        await send({"type": "websocket.send", "text": "slowly"})

    app = MessageLimit(limiter(), on_refusal=answer).wrap(echo(None))
    assert await talk(app, 5) == ["0", "1", "2", "slowly", "slowly"]


async def test_messages_can_cost_their_size() -> None:
    limit = MessageLimit(limiter(sliding_window("100/minute", unit="bytes")))
    app = limit.wrap(echo(None), cost=lambda message: {"bytes": 50 if message["text"] == "0" else 60})
    assert await talk(app, 2) == ["0", (1008, "Too many messages")]
    too_large = limit.wrap(echo(None), cost=lambda message: {"bytes": 101})
    assert await talk(too_large, 2) == [(1008, "Too many messages")]


async def test_requests_pass_and_places_are_refused() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    await MessageLimit(limiter("0/minute")).wrap(app)({"type": "http"}, print, print)
    assert seen == [({"type": "http"}, print, print)]
    with pytest.raises(ConfigError, match=r"^a message holds no place: "):
        MessageLimit(limiter(concurrent(5, lease="1m")))
