"""Limits in aiohttp, and the examples of the how-to page for Litestar and Quart, which need no separate module."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer as AiohttpServer
from litestar import Litestar, get
from litestar.middleware import DefineMiddleware
from quart import Quart, Response, request

from headgate import AsyncLimiter, ConfigError, Limiter, MemoryStore, RateLimited, concurrent
from headgate.http import by_address, by_all, by_header, by_route
from headgate.http.aiohttp import decision, exempt, install, limit, scope_of
from headgate.http.asgi import RateLimitMiddleware, answer_refusal, raised_answer
from tests.integration.http.clients import client_of, is_complete, left, policies

USER = web.RequestKey("user", str)


async def ok(request: web.Request) -> web.StreamResponse:
    return web.Response(text="ok")


@asynccontextmanager
async def aiohttp_client(
    *limits: Any, middlewares: Any = (), **handlers: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of an application with these handlers, by name; `_n` at the end is a part of the path."""
    app = web.Application(middlewares=middlewares)
    install(app, *limits)
    for name, handler in handlers.items():
        app.router.add_route("*", f"/{name.replace('_n', '/{n}')}", handler)
    async with AiohttpServer(app) as server, httpx.AsyncClient(base_url=str(server.make_url("/"))) as client:
        yield client


class TestAiohttp:
    async def test_every_response_has_the_fields(self) -> None:
        async def broken(request: web.Request) -> web.StreamResponse:
            raise RuntimeError("broken")

        async def gone(request: web.Request) -> web.StreamResponse:
            raise web.HTTPGone

        async def stream(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"part")
            return response

        async with aiohttp_client("5/minute", ok=ok, broken=broken, gone=gone, stream=stream) as client:
            responses = [
                await client.get(path) for path in ("ok", "broken", "gone", "stream", "nowhere", "ok")
            ]
        assert [response.status_code for response in responses] == [200, 500, 410, 200, 404, 429]
        assert all(map(is_complete, responses))
        assert responses[-1].json()["violated-policies"] == ["per-minute"]

    async def test_handlers_override_the_default_limits(self) -> None:
        shared = limit("2/minute")

        class Pages(web.View):
            @limit("1/minute")
            async def get(self) -> web.StreamResponse:
                return web.Response(text="got")

            @exempt
            async def put(self) -> web.StreamResponse:
                return web.Response(text="put")

        @exempt
        async def free(request: web.Request) -> web.StreamResponse:
            return web.Response(text=str(decision(request)))

        @limit("7/day")
        async def told(request: web.Request) -> web.StreamResponse:
            found = decision(request)
            assert found is not None
            return web.Response(text=str(found.remaining))

        default = limit("9/hour", default=True)
        async with aiohttp_client(
            default, a=shared(ok), b=shared(ok), other=ok, free=free, told=told, pages=Pages
        ) as client:
            assert [(await client.get(path)).status_code for path in "aba"] == [200, 200, 429]
            assert policies(await client.get("other")) == {"per-hour": 9}
            response = await client.get("free")
            assert (response.text, "ratelimit" in response.headers) == ("None", False)
            response = await client.get("told")
            assert (response.text, policies(response)) == ("6", {"per-day": 7})
            assert [(await client.get("pages")).status_code for _ in range(2)] == [200, 429]
            response = await client.put("pages")
            assert (response.text, "ratelimit" in response.headers) == ("put", False)

    async def test_functions_take_the_request(self) -> None:
        @web.middleware
        async def authenticate(request: web.Request, handler: Any) -> web.StreamResponse:
            request[USER] = request.headers.get("x-user", "nobody")
            response: web.StreamResponse = await handler(request)
            return response

        async def quota(request: web.Request) -> str | None:
            return f"{request.query['quota']}/minute" if "quota" in request.query else None

        limited = limit(
            "1/minute",
            key=by_all(lambda request: request[USER], lambda request: by_route()(scope_of(request))),
            quota=quota,
            cost=lambda request: int(request.query.get("cost", 1)),
            exempt=lambda request: "free" in request.query,
        )(ok)
        by_key = limit("1/minute", key=by_header("x-key"), address=by_address(proxies=["127.0.0.1"]))(ok)
        async with aiohttp_client(middlewares=[authenticate], item_n=limited, keyed=by_key) as client:
            codes = [
                (await client.get(path, headers={"x-user": user})).status_code
                for path, user in (("item/1", "a"), ("item/2", "a"), ("item/1", "b"))
            ]
            assert codes == [200, 429, 200]
            assert policies(await client.get("item/1?quota=5&cost=2", headers={"x-user": "c"})) == {
                "per-minute": 5
            }
            assert (await client.get("item/1?cost=2")).status_code == 413
            assert "ratelimit" not in (await client.get("item/1?free")).headers
            sent: list[dict[str, str]] = [
                {"x-key": "a"},
                {"x-key": "a"},
                {"x-forwarded-for": "192.0.2.1"},
                {},
            ]
            assert [(await client.get("keyed", headers=one)).status_code for one in sent] == [
                200,
                429,
                200,
                200,
            ]

    async def test_outcomes_and_places(self) -> None:
        async def status(request: web.Request) -> web.StreamResponse:
            if request.match_info["n"] == "500":
                raise RuntimeError("broken")
            return web.Response(status=int(request.match_info["n"]))

        places = limit(concurrent(1, lease="1m"))(ok)
        async with aiohttp_client(status_n=limit("1/minute", count={401})(status), places=places) as client:
            codes = [(await client.get(f"status/{n}")).status_code for n in (200, 500, 401, 200)]
            assert codes == [200, 500, 401, 429]
            assert [(await client.get("places")).status_code for _ in range(2)] == [200, 200]

    async def test_limits_of_application_and_subapplication_share_the_fields(self) -> None:
        """Holds of the outer application are settled, too."""

        @web.middleware
        async def mending(request: web.Request, handler: Any) -> web.StreamResponse:
            try:
                response: web.StreamResponse = await handler(request)
            except RuntimeError:
                return web.Response(status=404)
            return response

        async def page(request: web.Request) -> web.StreamResponse:
            if "broken" in request.query:
                raise RuntimeError("broken")
            return web.Response(text="ok")

        app, inner = web.Application(), web.Application()
        install(app, limit("1/hour", count={500}))
        app.middlewares.append(mending)
        install(inner, "9/minute")
        inner.router.add_get("/", page)
        app.add_subapp("/inner/", inner)
        async with AiohttpServer(app) as server, httpx.AsyncClient() as client:
            url = str(server.make_url("/inner/"))
            responses = [await client.get(url + query) for query in ("", "?broken", "")]
        assert [response.status_code for response in responses] == [200, 404, 200]
        assert policies(responses[-1]) == {"per-hour": 1, "per-minute": 9}
        assert left(responses[-1]) == {"per-hour": 1, "per-minute": 6}

    async def test_a_raised_refusal_is_answered(self) -> None:
        async with aiohttp_client("9/minute", report=AsyncLimiter("1/hour").guard("x")(ok)) as client:
            assert (await client.get("report")).status_code == 200
            refused = await client.get("report")
        assert refused.status_code == 429
        assert is_complete(refused)
        assert left(refused) == {"per-minute": 7, "per-hour": 0}

    async def test_default_names_on_a_given_store(self) -> None:
        store = MemoryStore()
        limited = limit("9/minute", store=store)(ok)
        async with aiohttp_client(limit("9/minute", store=store), limited=limited) as client:
            await client.get("limited")
        for name in ("application", f"{__name__}.ok"):
            assert Limiter("9/minute", name=name, store=store).check("127.0.0.1", 0).remaining == 8

    async def test_configuration_errors_name_the_fix(self) -> None:
        with pytest.raises(ConfigError, match="install"):
            limit("1/minute", default=True)(ok)
        with pytest.raises(ConfigError, match="install is for an application of aiohttp, not '1/minute'"):
            install("1/minute")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="type AsyncLimiter, not <Limiter"):
            install(web.Application(), Limiter("1/minute"))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="functions of the request"):
            limit("1/minute", key="user")(ok)  # type: ignore[arg-type]
        app = web.Application()
        app.router.add_get("/", limit("1/minute")(ok))
        async with AiohttpServer(app) as server, httpx.AsyncClient() as client:
            assert (await client.get(str(server.make_url("/")))).status_code == 500

    async def test_limit_above_the_route_decorator_is_refused(self) -> None:
        app, inner, routes = web.Application(), web.Application(), web.RouteTableDef()
        install(app)

        @limit("1/minute")
        @routes.get("/")
        async def page(request: web.Request) -> web.StreamResponse:
            return web.Response()

        inner.add_routes(routes)
        app.add_subapp("/inner", inner)
        with pytest.raises(ConfigError, match=r"@limit\(…\) below .*page"):
            async with AiohttpServer(app):
                pass

    async def test_limit_applies_only_where_the_limited_handler_is_registered(self) -> None:
        async def page(request: web.Request) -> web.StreamResponse:
            return web.Response()

        limited, bare = web.Application(), web.Application()
        for app in (limited, bare):
            install(app)
        limited.router.add_get("/", limit("1/minute")(page))
        bare.router.add_get("/", page)
        async with AiohttpServer(bare) as server, httpx.AsyncClient() as client:
            codes = [(await client.get(str(server.make_url("/")))).status_code for _ in range(2)]
        assert codes == [200, 200]


async def test_litestar() -> None:
    @get("/login", middleware=[DefineMiddleware(RateLimitMiddleware, limiter="1/minute")])
    async def login() -> str:
        return "login"

    @get("/report")
    @AsyncLimiter("1/hour").guard("report")
    async def report() -> str:
        return "report"

    app = Litestar([login, report], exception_handlers={RateLimited: answer_refusal})  # type: ignore[dict-item]
    async with client_of(RateLimitMiddleware(app, "9/day")) as client:  # type: ignore[arg-type]
        responses = [
            await client.get(path) for path in ("/login", "/login", "/report", "/report", "/nowhere")
        ]
    assert [response.status_code for response in responses] == [200, 429, 200, 429, 404]
    assert all(map(is_complete, responses))
    assert left(responses[0]) == {"per-day": 8, "per-minute": 0}


async def test_quart() -> None:
    app = Quart("service")
    reports = AsyncLimiter("1/minute")

    @app.get("/")
    async def home() -> str:
        return "home"

    @app.get("/report")
    @reports.guard(key=lambda: request.remote_addr)
    async def report() -> str:
        return "report"

    @app.errorhandler(RateLimited)
    async def refused(error: RateLimited) -> Response:
        answer = raised_answer(request.scope, error)
        return Response(answer.body, answer.status, dict(answer.headers))

    app.asgi_app = RateLimitMiddleware(app.asgi_app, "9/day")  # type: ignore[method-assign, assignment, arg-type]
    async with client_of(app) as client:
        responses = [await client.get(path) for path in ("/", "/report", "/report", "/nowhere")]
    assert [response.status_code for response in responses] == [200, 200, 429, 404]
    assert all(map(is_complete, responses))
