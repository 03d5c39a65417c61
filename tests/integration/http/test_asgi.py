"""The ASGI middleware around real Starlette applications, and around bare ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.websockets import WebSocket

from headgate import (
    AsyncLimiter,
    ConfigError,
    Limiter,
    MemoryStore,
    RateLimited,
)
from headgate.http import by_address, by_all, by_header, by_route
from headgate.http.asgi import RateLimitMiddleware, answer_refusal
from headgate.http.fastapi import install, limit
from tests.integration.http.clients import client_of, connect, is_complete, left, policies, response_of


async def home(request: Request) -> Response:
    return PlainTextResponse("home")


async def item(request: Request) -> Response:
    return PlainTextResponse(request.path_params["id"])


async def broken(request: Request) -> Response:
    raise RuntimeError("broken")


async def echo(websocket: WebSocket) -> None:
    await websocket.accept()
    await websocket.send_text(await websocket.receive_text())
    await websocket.close()


async def own_fields(request: Request) -> Response:
    return PlainTextResponse("", headers={"X-RateLimit-Limit": "7", "x-ratelimit-used": "3", "X-Own": "kept"})


ROUTES = [
    Route("/", home),
    Route("/items/{id}", item),
    Route("/broken", broken),
    Route("/own", own_fields),
    WebSocketRoute("/echo", echo),
    Mount("/tenants/{tenant}", routes=[Route("/users/{user}", home)]),
]


def application(limiter: Any = "5/minute", **arguments: Any) -> RateLimitMiddleware:
    return RateLimitMiddleware(Starlette(routes=ROUTES), limiter, **arguments)  # type: ignore[arg-type]


async def test_fields_of_the_application_are_replaced() -> None:
    async with client_of(application()) as client:
        response = await client.get("/own")
    assert response.headers.get_list("x-ratelimit-limit") == ["5"]
    assert "x-ratelimit-used" not in response.headers
    assert response.headers["x-own"] == "kept"


async def test_reused_response_message_is_not_modified() -> None:
    start = {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start)
        await send({"type": "http.response.body", "body": b""})

    async with client_of(RateLimitMiddleware(app, "5/minute")) as client:
        assert all([is_complete(await client.get("/")) for _ in range(3)])
    assert start["headers"] == [(b"a", b"b")]


async def test_response_start_without_headers_gets_the_fields() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body"})

    async with client_of(RateLimitMiddleware(app, "5/minute")) as client:
        assert is_complete(await client.get("/"))


# --- Exceptions -------------------------------------------------------------------------------------------------------


async def test_an_exception_still_reaches_the_server() -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("nobody caught this")

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("not needed")

    scope = {"type": "http", "path": "/", "headers": [], "client": ("192.0.2.1", 1)}
    with pytest.raises(RuntimeError, match="nobody caught this"):
        await RateLimitMiddleware(app, "5/minute")(scope, receive, send)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == 500
    assert {name for name, _ in sent[0]["headers"]} >= {b"ratelimit", b"x-ratelimit-limit"}


async def test_an_exception_in_the_middle_of_a_response_is_not_answered_again() -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("too late")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/", "headers": [], "client": ("192.0.2.1", 1)}
    with pytest.raises(RuntimeError):
        await RateLimitMiddleware(app, "5/minute")(scope, send, send)  # type: ignore[arg-type]
    assert len(sent) == 1


async def test_with_add_middleware_exceptions_are_answered_like_starlette() -> None:
    bare, limited = (Starlette(routes=ROUTES) for _ in range(2))
    limited.add_middleware(RateLimitMiddleware, limiter="5/minute")
    async with client_of(bare) as client:
        expected = await client.get("/broken")
    async with client_of(limited) as client:
        response = await client.get("/broken")
        assert is_complete(await client.get("/nowhere"))
    assert is_complete(response)
    assert (response.status_code, response.text) == (expected.status_code, expected.text)
    assert response.headers["content-type"] == expected.headers["content-type"]


async def handle(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 500)


async def test_with_add_middleware_exception_handlers_still_work() -> None:
    app = Starlette(routes=ROUTES, exception_handlers={Exception: handle})
    app.add_middleware(RateLimitMiddleware, limiter="5/minute")
    async with client_of(app) as client:
        assert (await client.get("/broken")).json() == {"error": "broken"}


async def test_around_an_application_handler_responses_have_the_fields() -> None:
    app = Starlette(routes=ROUTES, exception_handlers={500: handle})
    async with client_of(RateLimitMiddleware(app, "5/minute")) as client:  # type: ignore[arg-type]
        response = await client.get("/broken")
    assert response.json() == {"error": "broken"}
    assert is_complete(response)


async def test_debug_pages_and_outer_middleware_are_not_changed() -> None:
    class Outer:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            try:
                await self.app(scope, receive, send)
            except RuntimeError:
                await PlainTextResponse("caught outside", 502)(scope, receive, send)

    debugged = Starlette(routes=ROUTES, debug=True)
    debugged.add_middleware(RateLimitMiddleware, limiter="5/minute")
    outer = Starlette(
        routes=ROUTES, middleware=[Middleware(Outer), Middleware(RateLimitMiddleware, limiter="5/minute")]
    )
    async with client_of(debugged) as client:
        assert "Traceback" in (await client.get("/broken")).text
    async with client_of(outer) as client:
        assert (await client.get("/broken")).text == "caught outside"


# --- Streams, handshakes, lifespan ------------------------------------------------------------------------------------


async def test_stream_is_not_buffered() -> None:
    going_on = asyncio.Event()
    pieces: list[bytes] = []

    async def stream() -> AsyncIterator[bytes]:
        yield b"first"
        await going_on.wait()
        yield b"second"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await StreamingResponse(stream())(scope, receive, send)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message.get("body"):
            pieces.append(message["body"])
            if message["body"] == b"first":
                going_on.set()  # the next piece is made only after this one arrived

    scope = {
        "type": "http",
        "path": "/",
        "headers": [],
        "client": ("192.0.2.1", 1),
        "asgi": {"spec_version": "2.4"},
    }
    await asyncio.wait_for(RateLimitMiddleware(app, "5/minute")(scope, receive, send), 10)
    assert pieces == [b"first", b"second"]


async def test_handshakes_are_limited_and_refused_with_a_response() -> None:
    app = application("1/minute")
    accept, text, close = await connect(app)
    assert accept["type"] == "websocket.accept"
    assert {name for name, _ in accept["headers"]} >= {b"ratelimit", b"x-ratelimit-limit"}
    assert text["text"] == "hello"
    assert "headers" not in text
    assert close["type"] == "websocket.close"
    refused = response_of(await connect(app, heard=True))
    assert refused.status_code == refused.json()["status"] == 429
    assert is_complete(refused)


async def test_handshake_is_closed_if_server_lacks_denial_responses() -> None:
    app = application("1/minute")
    accept, *_ = await connect(app, denial=False)
    assert accept["type"] == "websocket.accept"
    [close] = await connect(app, denial=False, heard=True)
    assert (close["type"], close["code"]) == ("websocket.close", 1008)


@pytest.mark.parametrize("kind", ["lifespan", "something.else"])
async def test_lifespan_and_unknown_scopes_pass_through(kind: str) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, await receive()))
        await send("answer")

    async def receive() -> Any:
        return "question"

    async def send(message: Any) -> None:
        seen.append(message)

    scope = {"type": kind}
    await RateLimitMiddleware(app, AsyncLimiter("0/minute"))(scope, receive, send)
    assert seen == [({"type": kind}, "question"), "answer"]


# --- Keys, costs, tiers, exemptions -----------------------------------------------------------------------------------


async def test_by_route_template_works_before_routing() -> None:
    starlette = Starlette(routes=ROUTES)
    starlette.add_middleware(RateLimitMiddleware, limiter="1/minute", key=by_all(by_address(), by_route()))
    async with client_of(starlette) as client:
        paths = [
            "/items/1",
            "/items/2",
            "/",
            "/made/up",
            "/made/up/too",
            "/tenants/1/users/2",
            "/tenants/3/users/4",
        ]
        codes = [(await client.get(path)).status_code for path in paths]
    assert codes == [200, 429, 200, 404, 429, 200, 429]


async def test_by_route_template_works_with_included_fastapi_routers() -> None:
    router = APIRouter()

    @router.get("/items/{number}")
    async def numbered(number: int) -> None: ...

    app = FastAPI()
    app.include_router(router, prefix="/v1")
    app.include_router(router, prefix="/v2")
    app.add_middleware(RateLimitMiddleware, limiter="1/minute", key=by_route())
    async with client_of(app) as client:
        paths = ["/v1/items/1", "/v1/items/2", "/v2/items/1", "/v3/items/1", "/v4/items/1"]
        codes = [(await client.get(path)).status_code for path in paths]
    assert codes == [200, 429, 200, 404, 429]


hostile_fields = st.lists(
    st.tuples(
        st.sampled_from([b"x-forwarded-for", b"forwarded", b"accept", b"x-api-key", b"x-tier"]),
        st.binary(max_size=60)
        | st.text(alphabet='0123456789abcdef.:,;="[]%_ /*+-forqtextjson', max_size=60).map(str.encode),
    ),
    max_size=6,
)


@given(
    hostile_fields,
    st.sampled_from(["x-forwarded-for", "forwarded"]),
    st.sampled_from(["9/minute", "0/minute"]),
)
async def test_arbitrary_request_headers_never_cause_an_error(fields: Any, header: Any, quota: str) -> None:
    app = application(
        quota,
        key=by_all(by_address(proxies=["192.0.2.1"], header=header), by_header("x-api-key")),
        tier=lambda scope: dict(scope["headers"]).get(b"x-tier", b"").decode("latin-1"),
    )
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/",
        "root_path": "",
        "query_string": b"",
        "headers": fields,
        "client": ("192.0.2.1", 1),
    }
    await app(scope, receive, send)
    assert sent[0]["status"] == (200 if quota == "9/minute" else 429)
    response = httpx.Response(sent[0]["status"], headers=sent[0]["headers"], content=sent[1]["body"])
    assert left(response).keys() == policies(response).keys() == {"per-minute"}


async def test_exempt_paths_do_not_call_the_limiter() -> None:
    async with client_of(application("0/minute", exempt=["/", "/own"])) as client:
        response = await client.get("/")
        assert response.status_code == 200
        assert "ratelimit" not in response.headers
        assert (await client.get("/items/1")).status_code == 429


@pytest.mark.parametrize(
    ("limiter", "options", "message"),
    [
        *((wrong, {}, "AsyncLimiter") for wrong in (Limiter("5/minute"), 5, None)),
        ("5/minute", {"exempt": "/health"}, "a list like"),
        ("5/minute", {"quota": "7/hour"}, "the period of '5/minute'"),
        ("5/minute", {"quota": "seven"}, "a whole number of units"),
        ("5/minute", {"quota": {"typo": "7/minute"}}, "no rule is called 'typo'"),
    ],
)
def test_invalid_options_are_refused_when_the_application_is_created(
    limiter: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        application(limiter, **options)


# --- Counting outcomes ------------------------------------------------------------------------------------------------


async def test_parallel_requests_cannot_exceed_the_limit_before_outcomes_are_known() -> None:
    """The units are held while the outcome is open: guessing in parallel does not help."""
    entered = asyncio.Event()
    leaving = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        entered.set()
        await leaving.wait()
        await PlainTextResponse("no", 401)(scope, receive, send)

    async with client_of(RateLimitMiddleware(slow, "1/minute", count={401})) as client:
        first = asyncio.create_task(client.get("/"))
        await entered.wait()
        assert (await client.get("/")).status_code == 429
        leaving.set()
        assert (await first).status_code == 401


async def test_a_cancelled_request_counts() -> None:
    entered = asyncio.Event()

    async def never(scope: Any, receive: Any, send: Any) -> None:
        entered.set()
        await asyncio.Event().wait()

    limiter = AsyncLimiter("1/minute")
    async with client_of(RateLimitMiddleware(never, limiter, count={401})) as client:
        task = asyncio.create_task(client.get("/"))
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not await limiter.check("192.0.2.1")


async def test_an_accepted_handshake_has_status_101() -> None:
    app = application("1/minute", count=range(400, 600))
    for _ in range(3):
        assert (await connect(app))[0]["type"] == "websocket.accept"


# --- Refusals that the application raises, and quotas from data -------------------------------------------------------


def guarded() -> Any:
    own = AsyncLimiter("1/minute", name="report", store=MemoryStore())

    @own.guard("report")
    async def report(request: Request) -> Response:
        return PlainTextResponse("report")

    return report


async def test_a_raised_refusal_is_answered_by_the_handler_without_the_middleware() -> None:
    app: Any = Starlette(routes=[Route("/", guarded())], exception_handlers={RateLimited: answer_refusal})
    async with client_of(app) as client:
        assert (await client.get("/")).status_code == 200
        refused = await client.get("/")
    assert refused.status_code == 429
    assert refused.json()["violated-policies"] == ["per-minute"]
    assert int(refused.headers["retry-after"]) == refused.json()["retry_after"]
    assert left(refused) == {"per-minute": 0}


async def test_a_raised_refusal_is_answered_by_the_middleware() -> None:
    """Around an application without a handler, and inside of Starlette."""
    report = guarded()

    async def bare(scope: Any, receive: Any, send: Any) -> None:
        await (await report(Request(scope)))(scope, receive, send)

    inside = Starlette(
        routes=[Route("/", guarded())], middleware=[Middleware(RateLimitMiddleware, limiter="9/hour")]
    )
    for app in (RateLimitMiddleware(bare, "9/hour"), inside):
        async with client_of(app) as client:
            codes = [(await client.get("/")).status_code for _ in range(2)]
            assert codes == [200, 429]
            assert policies(await client.get("/")) == {"per-hour": 9}


async def test_quota_function_may_be_async() -> None:
    asked = []

    async def quota(scope: Any) -> str | None:
        asked.append(scope["path"])
        return "7/minute"

    for arguments, times in (({}, 1), ({"quota_for": 0}, 2), ({"count": {200}}, 1)):
        asked.clear()
        async with client_of(application("5/minute", quota=quota, **arguments)) as client:
            responses = [await client.get("/") for _ in range(2)]
        assert [left(response)["per-minute"] for response in responses] == [6, 5]
        assert policies(responses[1]) == {"per-minute": 7}
        assert len(asked) == times


async def test_rules_changed_by_a_remote_store_appear_under_their_names() -> None:
    """A remote store may decide by other rules than the limiter was created with."""
    limiter, others = AsyncLimiter("2/minute"), AsyncLimiter("3/minute", "9/hour")
    limiter.gate = others.gate
    async with client_of(application(limiter)) as client:
        responses = [await client.get("/") for _ in range(4)]
    assert left(responses[0]) == {"per-minute": 2, "per-hour": 8}
    assert responses[3].status_code == 429
    assert responses[3].json()["violated-policies"] == ["per-minute"]


async def test_outer_cors_middleware_adds_its_headers_to_refusals() -> None:
    allowed: dict[str, Any] = {
        "allow_origins": ["*"],
        "allow_methods": ["*"],
        "expose_headers": ["Retry-After", "RateLimit"],
    }
    limited = [
        Middleware(CORSMiddleware, **allowed),
        Middleware(RateLimitMiddleware, limiter="1/minute"),
    ]
    added = FastAPI(routes=[Route("/", home)])
    added.add_middleware(RateLimitMiddleware, limiter="1/minute")
    added.add_middleware(CORSMiddleware, **allowed)
    depending = FastAPI(dependencies=[Depends(limit("1/minute"))])
    depending.add_middleware(CORSMiddleware, **allowed)
    install(depending)

    depending.get("/")(lambda: "ok")
    preflight = {"origin": "https://page.example", "access-control-request-method": "POST"}
    for app in (Starlette(routes=[Route("/", home)], middleware=limited), added, depending):
        async with client_of(app) as client:
            assert (await client.options("/", headers=preflight)).status_code == 200
            responses = [await client.get("/", headers={"origin": "https://page.example"}) for _ in range(2)]
        assert [response.status_code for response in responses] == [200, 429]
        for response in responses:
            assert response.headers["access-control-allow-origin"] == "*"
            assert response.headers["access-control-expose-headers"] == "Retry-After, RateLimit"
