"""Limits as dependencies of real FastAPI applications."""

from __future__ import annotations

from typing import Annotated, Any

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Request, Response, WebSocket
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.applications import Starlette

from headgate import (
    AsyncLimiter,
    ConfigError,
    Decision,
    HeadgateError,
    Limiter,
    MemoryStore,
    RateLimited,
    sliding_window,
)
from headgate.http import Headers, by_route
from headgate.http.asgi import RateLimitMiddleware
from headgate.http.fastapi import RequestRefused, decision, exempt, install, limit
from headgate.http.testing import fresh_limits, limits_off
from headgate.stores.counters import ImmediateGate
from headgate.testing import FakeClock
from tests.integration.http.clients import client_of, connect, is_complete, left, policies, response_of


def application(dependency: Any = None, **arguments: Any) -> FastAPI:
    """Return an application with a route for each kind of outcome, all with the dependency."""
    app = FastAPI(dependencies=[Depends(dependency)] if dependency else [], **arguments)
    install(app)

    @app.get("/")
    async def home() -> dict[str, str]:
        return {"hello": "world"}

    @app.get("/sync")
    def in_a_thread() -> str:
        return "done"

    @app.get("/items/{number}")
    async def item(number: int) -> int:
        return number

    @app.get("/missing")
    async def missing() -> None:
        raise HTTPException(404, headers={"x-own": "kept"})

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("broken")

    @app.websocket("/echo")
    async def echo(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text(await websocket.receive_text())
        await websocket.close()

    return app


async def codes(app: Any, *paths: str, **headers: str) -> list[int]:
    async with client_of(app) as client:
        return [(await client.get(path, headers=headers)).status_code for path in paths]


# --- Fields on every response -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "code"), [("/sync", 200), ("/items/seven", 422), ("/missing", 404)])
async def test_responses_made_by_fastapi_have_the_fields(path: str, code: int) -> None:
    async with client_of(application(limit("5/minute"))) as client:
        response = await client.get(path)
    assert response.status_code == code
    assert is_complete(response)
    assert response.headers.get("x-own") == ("kept" if code == 404 else None)


async def test_catch_all_exception_handler_is_called_once_and_gets_the_fields() -> None:
    calls = []
    app = application(limit("5/minute"))

    @app.exception_handler(Exception)
    async def handle(request: Request, error: Exception) -> Response:
        calls.append(error)
        return JSONResponse({"error": str(error)}, 500)

    async with client_of(app) as client:
        response = await client.get("/broken")
    assert response.json() == {"error": "broken"}
    assert is_complete(response)
    assert len(calls) == 1


async def test_dependency_returns_the_decision() -> None:
    app = FastAPI()

    @app.get("/")
    async def home(decision: Annotated[Decision, Depends(limit("5/minute"))]) -> int | None:
        return decision.remaining

    async with client_of(app) as client:
        assert (await client.get("/")).json() == 4


# --- Without install --------------------------------------------------------------------------------------------------


def uninstalled(*dependencies: Any) -> FastAPI:
    app = FastAPI(dependencies=[Depends(dependency) for dependency in dependencies])

    @app.get("/")
    async def home() -> str:
        return "home"

    return app


async def test_fields_are_sent_without_install() -> None:
    async with client_of(uninstalled(limit("9/hour"), limit("1/minute"))) as client:
        first, second = [await client.get("/") for _ in range(2)]
    assert (first.status_code, second.status_code) == (200, 429)
    assert is_complete(first)
    assert is_complete(second)
    assert left(first) == {"per-hour": 8, "per-minute": 0}
    assert second.headers["content-type"] == "application/problem+json"


async def test_without_install_outcomes_cannot_be_counted() -> None:
    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        assert message.get("status", 500) == 500

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/",
        "headers": [],
        "query_string": b"",
        "client": ("a", 1),
    }
    with pytest.raises(ConfigError, match="install"):
        await uninstalled(limit("5/minute", count={401}))(scope, receive, send)


async def test_install_requires_a_fastapi_application() -> None:
    for wrong in (Starlette(), FastAPI, "app"):
        with pytest.raises(ConfigError, match="install is for an application of FastAPI, not "):
            install(wrong)  # type: ignore[arg-type]


async def test_install_after_the_first_request_is_refused() -> None:
    app = uninstalled()
    await codes(app, "/")
    with pytest.raises(ConfigError, match="before the first request"):
        install(app)


# --- Defaults, overrides, exemptions, shared limits -------------------------------------------------------------------


def with_default() -> FastAPI:
    app = FastAPI(dependencies=[Depends(limit("3/minute", name="default", default=True))])
    install(app)

    @app.get("/plain")
    async def plain() -> None: ...

    @app.get("/strict", dependencies=[Depends(limit("1/hour"))])
    async def strict() -> None: ...

    @app.get("/health", dependencies=[Depends(exempt)])
    async def health() -> None: ...

    router = APIRouter(dependencies=[Depends(limit("2/hour", default=True))])

    @router.get("/near")
    async def near() -> None: ...

    @router.get("/own", dependencies=[Depends(limit("1/hour")), Depends(limit("5/s"))])
    async def own() -> None: ...

    @router.get("/free", dependencies=[Depends(exempt)])
    async def free() -> None: ...

    @router.get("/freed", dependencies=[Depends(exempt), Depends(limit("1/day"))])
    async def freed() -> None: ...

    app.include_router(router, prefix="/router")
    return app


@pytest.mark.parametrize(
    ("path", "quotas"),
    [
        ("/plain", {"per-minute": 3}),
        ("/strict", {"per-hour": 1}),
        ("/health", {}),
        ("/router/near", {"per-hour": 2}),
        ("/router/own", {"per-hour": 1, "per-second": 5}),
        ("/router/free", {}),
        ("/router/freed", {"per-day": 1}),
    ],
)
async def test_nearest_limits_apply(path: str, quotas: dict[str, int]) -> None:
    async with client_of(with_default()) as client:
        response = await client.get(path)
    assert response.status_code == 200
    assert (policies(response) if "ratelimit-policy" in response.headers else {}) == quotas


# --- Routers, sub-applications, handshakes ----------------------------------------------------------------------------


@pytest.mark.parametrize("installed", [True, False])
async def test_sub_applications(installed: bool) -> None:
    sub = FastAPI(dependencies=[Depends(limit("1/minute", key=by_route()))])

    @sub.get("/items/{number}")
    async def item(number: int) -> int:
        if number == 0:
            raise HTTPException(404)
        return number

    app = FastAPI()
    app.mount("/tenants/{tenant}", sub)
    if installed:
        install(app)
        install(sub)
    async with client_of(app) as client:
        first, second = await client.get("/tenants/a/items/1"), await client.get("/tenants/b/items/2")
        document = (await client.get("/tenants/a/openapi.json")).json()
    assert (first.status_code, second.status_code) == (200, 429)
    assert is_complete(first)
    assert is_complete(second)
    assert ("429" in document["paths"]["/items/{number}"]["get"]["responses"]) == installed


async def test_install_on_the_outer_application_covers_errors_of_the_inner_one() -> None:
    app = FastAPI()
    install(app)
    app.mount("/inner", application(limit("5/minute")))
    async with client_of(app) as client:
        for path in ("/inner/missing", "/inner/broken", "/inner/"):
            assert is_complete(await client.get(path))


async def test_handshakes_are_limited() -> None:
    app = application(limit("1/minute"))
    accept, text, _ = await connect(app)
    assert accept["type"] == "websocket.accept"
    assert (b"x-ratelimit-limit", b"1") in accept["headers"]
    assert text["text"] == "hello"
    refused = response_of(await connect(app))
    assert refused.status_code == refused.json()["status"] == 429
    assert is_complete(refused)
    [close] = await connect(app, denial=False)
    assert (close["type"], close["code"]) == ("websocket.close", 1008)


async def test_exemptions_apply_to_handshakes_on_included_routers() -> None:
    router = APIRouter()

    @router.websocket("/echo", dependencies=[Depends(exempt)])
    async def echo(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.close()

    app = FastAPI(dependencies=[Depends(limit("0/minute"))])
    install(app)
    app.include_router(router)
    assert (await connect(app))[0]["type"] == "websocket.accept"


async def test_dependency_and_middleware_share_the_fields() -> None:
    app = application(limit("9/hour"))
    app.add_middleware(RateLimitMiddleware, limiter="5/minute")
    async with client_of(app) as client:
        response = await client.get("/")
    assert is_complete(response)
    assert left(response) == {"per-minute": 4, "per-hour": 8}


# --- Keys, costs, tiers -----------------------------------------------------------------------------------------------


async def current_user(authorization: Annotated[str | None, Header()] = None) -> dict[str, Any]:
    if authorization is None:
        raise HTTPException(401)
    return {"id": authorization, "plan": "pro" if authorization == "ada" else "free"}


CurrentUser = Annotated[dict[str, Any], Depends(current_user)]


async def user_id(user: CurrentUser) -> str:
    return str(user["id"])


def plan(user: CurrentUser) -> str:
    return str(user["plan"])


def units(n: int = 1) -> int:
    return n


async def test_every_option_may_be_a_dependency() -> None:
    rule = sliding_window("2/minute", tiers={"pro": "20/minute"})
    app = application(limit(rule, key=Depends(user_id), tier=Depends(plan), cost=Depends(units)))
    assert await codes(app, "/", "/?n=2", "/", authorization="bob") == [200, 429, 200]
    assert await codes(app, "/?n=3", "/?n=17", "/", authorization="ada") == [200, 200, 429]
    assert await codes(app, "/?n=21", authorization="ada") == [413]
    assert await codes(app, "/") == [401]


@pytest.mark.parametrize(
    ("rules", "arguments"),
    [
        ((), {}),
        ((AsyncLimiter("5/minute"), "5/minute"), {}),
        ((AsyncLimiter("5/minute"),), {"name": "x"}),
        ((5,), {}),
    ],
)
def test_invalid_limits_are_refused(rules: Any, arguments: Any) -> None:
    with pytest.raises(ConfigError):
        limit(*rules, **arguments)


# --- Counting outcomes ------------------------------------------------------------------------------------------------


async def test_failed_handshake_is_an_outcome() -> None:
    app = FastAPI()
    install(app)

    @app.websocket("/echo", dependencies=[Depends(limit("1/minute", count={101}))])
    async def echo(websocket: WebSocket) -> None:
        raise RuntimeError("before it was accepted")

    for _ in range(3):
        with pytest.raises(RuntimeError):
            await connect(app)


async def test_an_earlier_hold_is_settled_when_a_later_limit_refuses() -> None:
    """429 does not count for the first limit, so its units are given back."""
    outcomes = limit("1/minute", count=range(200, 300), name="outcomes")
    app = FastAPI(dependencies=[Depends(outcomes), Depends(limit("0/minute"))])
    install(app)

    @app.get("/")
    async def home() -> None: ...

    assert await codes(app, "/", "/") == [429, 429]
    assert await outcomes.limiter.check("192.0.2.1")


# --- Custom responses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("handled", [429, RequestRefused, HTTPException])
async def test_custom_refusal_handler_answers(handled: Any, installed: bool) -> None:
    app = uninstalled(limit("1/minute"))
    if installed:
        install(app)

    @app.exception_handler(handled)
    async def handle(request: Request, error: HTTPException) -> Response:
        return PlainTextResponse(f"slow down: {error.detail}", error.status_code, headers=error.headers)

    async with client_of(app) as client:
        await client.get("/")
        response = await client.get("/")
    assert response.text == "slow down: Too Many Requests"
    assert is_complete(response)


async def test_dependencies_can_be_overridden_as_usual() -> None:
    strict = limit("0/minute")
    app = application(strict)
    assert await codes(app, "/") == [429]
    app.dependency_overrides[strict] = lambda: None
    assert await codes(app, "/") == [200]


# --- OpenAPI ----------------------------------------------------------------------------------------------------------


async def test_refusals_are_in_the_openapi_document() -> None:
    app = with_default()

    @app.get("/costly", dependencies=[Depends(limit("5/minute", cost=lambda request: 1))])
    async def costly() -> None: ...

    @app.get(
        "/described",
        dependencies=[Depends(limit("5/minute", headers=Headers(x_ratelimit=None, ratelimit=7)))],
        responses={429: {"description": "as I say"}},
    )
    async def described() -> None: ...

    @app.get("/hidden", include_in_schema=False)
    async def hidden() -> None: ...

    async with client_of(app) as client:
        document = (await client.get("/openapi.json")).json()
        assert document == (await client.get("/openapi.json")).json()
    operations = {path: methods["get"]["responses"] for path, methods in document["paths"].items()}
    assert {path for path, responses in operations.items() if "429" in responses} == {
        "/plain",
        "/strict",
        "/router/near",
        "/router/own",
        "/router/freed",
        "/costly",
        "/described",
    }
    refusal = operations["/plain"]["429"]
    assert set(refusal["headers"]) == {
        "Retry-After",
        "RateLimit-Policy",
        "RateLimit",
        "X-RateLimit-Limit",
        "X-RateLimit-Remaining",
        "X-RateLimit-Reset",
    }
    reference = refusal["content"]["application/problem+json"]["schema"]["$ref"]
    assert reference == "#/components/schemas/RateLimitProblem"
    assert "violated-policies" in document["components"]["schemas"]["RateLimitProblem"]["properties"]
    assert "413" in operations["/costly"]
    assert "413" not in operations["/plain"]
    assert operations["/described"]["429"]["description"] == "as I say"


# --- Test helpers -----------------------------------------------------------------------------------------------------


async def test_limits_can_be_switched_off() -> None:
    app = application(limit("1/minute", count={200}))
    with limits_off():
        assert await codes(app, "/", "/", "/") == [200, 200, 200]
        assert await codes(application(limit("0/minute")), "/") == [200]
    assert await codes(app, "/", "/") == [200, 429]


async def test_limits_can_have_a_clock_and_be_reset() -> None:
    clock = FakeClock()
    app = application(limit("1/minute"))
    assert await codes(app, "/", "/") == [200, 429]
    with fresh_limits(clock=clock) as limits:
        assert await codes(app, "/", "/") == [200, 429]
        clock.advance(61)
        assert await codes(app, "/", "/") == [200, 429]
        limits.reset()
        assert await codes(app, "/", "/") == [200, 429]
        made_inside = application(limit("1/minute"))
        assert await codes(made_inside, "/", "/") == [200, 429]
        with limits_off():
            assert await codes(app, "/", "/") == [200, 200]
        assert await codes(app, "/") == [429]
        clock.advance(61)
        assert await codes(made_inside, "/") == [200]
    assert await codes(app, "/") == [429]
    assert await codes(made_inside, "/", "/") == [200, 429]


async def test_fresh_limits_do_not_call_the_store() -> None:
    class Silent(ImmediateGate):
        async def decide(self, request: Any) -> Any:
            raise AssertionError("the store was asked")

    class Unreachable(MemoryStore):
        def bind_async(self, limiter: str, rules: Any, *, deadline: float | None = None) -> Any:
            return Silent(self.bind(limiter, rules))

    app = application(limit("1/minute", name="x", store=Unreachable()))
    with fresh_limits():
        assert await codes(app, "/", "/") == [200, 429]


# --- Common mistakes --------------------------------------------------------------------------------------------------


async def test_exempt_routes_do_not_run_dependencies_of_limits() -> None:
    asked = []

    async def user_id(request: Request) -> str:
        asked.append(request.url.path)
        raise HTTPException(401)

    outer = limit("5/minute", key=Depends(user_id), default=True)
    app = FastAPI(dependencies=[Depends(outer)])
    router = APIRouter(dependencies=[Depends(limit("5/minute", tier=Depends(user_id)))])
    install(app)

    @app.get("/free", dependencies=[Depends(exempt)])
    @router.get("/free", dependencies=[Depends(exempt)])
    @router.get("/own", dependencies=[Depends(exempt), Depends(limit("7/minute"))])
    async def free(found: Annotated[Decision | None, Depends(decision)]) -> int | None:
        return None if found is None else found.remaining

    @app.get("/told", dependencies=[Depends(exempt)])
    async def told(found: Annotated[Decision | None, Depends(limit("3/minute"))]) -> int | None:
        return None if found is None else found.remaining

    app.include_router(router, prefix="/router")
    app.get("/limited")(free)
    async with client_of(app) as client:
        assert [(await client.get(path)).json() for path in ("/free", "/router/free", "/told")] == [
            None,
            None,
            2,
        ]
        assert (await client.get("/router/own")).json() == 6
        assert asked == []
        assert (await client.get("/limited")).status_code == 401
    assert "429" not in app.openapi()["paths"]["/free"]["get"]["responses"]


async def test_forgotten_depends_is_reported() -> None:
    one = limit("5/minute")
    app = FastAPI()
    with pytest.raises(ConfigError, match=r"Depends\(limit"):
        app.get("/", dependencies=[one])(lambda: None)  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"without being called.*Depends"):
        app.get("/", dependencies=[Depends(limit)])(lambda: None)
    with pytest.raises(ConfigError, match="cannot be used as a decorator"):

        @one
        async def endpoint() -> None: ...

    @app.get("/default")
    async def default(found=one) -> None: ...  # type: ignore[no-untyped-def]

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        with pytest.raises(ConfigError, match=r"Depends\(limit"):
            await client.get("/default")


async def test_limit_on_a_shared_store_is_named_after_its_route() -> None:
    store = MemoryStore()
    app = FastAPI()
    install(app)
    router = APIRouter(prefix="/items")

    @app.get("/items", dependencies=[Depends(limit("5/minute", store=store))])
    @router.get("/{number}", dependencies=[Depends(limit("5/minute", store=store))])
    @router.post("/{number}", dependencies=[Depends(limit("5/minute", store=store))])
    async def item() -> None: ...

    app.include_router(router, prefix="/v1")
    assert "429" in app.openapi()["paths"]["/items"]["get"]["responses"]
    async with client_of(app) as client:
        responses = [
            await client.get("/items"),
            await client.get("/v1/items/1"),
            await client.post("/v1/items/1"),
        ]
    assert [left(response) for response in responses] == [{"per-minute": 4}] * 3
    for name in ("GET /items", "GET /v1/items/{number}", "POST /v1/items/{number}"):
        assert Limiter("5/minute", name=name, store=store).check("192.0.2.1", 0).remaining == 4


async def test_limit_of_several_routes_on_a_shared_store_needs_a_name() -> None:
    app = FastAPI(dependencies=[Depends(limit("5/minute", store=MemoryStore()))])
    app.get("/a")(lambda: None)
    app.get("/b")(lambda: None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
        with pytest.raises(ConfigError, match="2 routes"):
            await client.get("/a")


async def test_a_raised_refusal_is_answered_without_install() -> None:
    own = AsyncLimiter("1/hour")
    app = FastAPI(dependencies=[Depends(limit("9/minute"))])

    @app.get("/")
    async def report(cost: int = 1) -> None:
        (await own.hit("report", cost)).raise_if_denied()

    async with client_of(app) as client:
        assert (await client.get("/")).status_code == 200
        refused = await client.get("/")
        assert refused.status_code == 429
        assert is_complete(refused)
        assert left(refused) == {"per-minute": 7, "per-hour": 0}
        assert (await client.get("/?cost=2")).status_code == 413


async def test_a_refusal_raised_in_an_open_websocket_closes_it() -> None:
    app = FastAPI()
    install(app)

    @app.websocket("/echo")
    async def echo(websocket: WebSocket) -> None:
        await websocket.accept()
        (await AsyncLimiter("0/hour").hit("x")).raise_if_denied()

    accept, close = await connect(app)
    assert accept["type"] == "websocket.accept"
    assert (close["type"], close["code"]) == ("websocket.close", 1008)


@pytest.mark.parametrize("kind", [RateLimited, HeadgateError])
@pytest.mark.parametrize("installed", [True, False])
async def test_custom_handler_of_raised_refusals_is_kept(kind: type[Exception], installed: bool) -> None:
    app = FastAPI(dependencies=[Depends(limit("9/minute"))])
    app.add_exception_handler(kind, lambda request, error: PlainTextResponse("own", 420))
    if installed:
        install(app)

    @app.get("/")
    @AsyncLimiter("0/hour").guard("x")
    async def never() -> None: ...

    async with client_of(app) as client:
        assert (await client.get("/")).status_code == 420


async def test_quotas_may_be_dependencies() -> None:
    async def bought(quota: int | None = None) -> str | None:
        return None if quota is None else f"{quota}/minute"

    app = FastAPI(dependencies=[Depends(limit("5/minute", quota=Depends(bought), quota_for=0))])
    install(app)
    app.get("/")(lambda: None)
    async with client_of(app) as client:
        assert policies(await client.get("/?quota=7")) == {"per-minute": 7}
        assert left(await client.get("/")) == {"per-minute": 3}
