"""Limits in aiohttp, and the examples of the how-to page for Litestar and Quart, which need no separate module."""

from __future__ import annotations

import asyncio
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
from headgate.http import by_all, by_route
from headgate.http.aiohttp import exempt, install, limit, scope_of
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
    async def test_methods_of_class_based_views_have_separate_limits(self) -> None:
        class Pages(web.View):
            @limit("1/minute")
            async def get(self) -> web.StreamResponse:
                return web.Response(text="got")

            @exempt
            async def put(self) -> web.StreamResponse:
                return web.Response(text="put")

        async with aiohttp_client(limit("9/hour", default=True), pages=Pages) as client:
            assert [(await client.get("pages")).status_code for _ in range(2)] == [200, 429]
            response = await client.put("pages")
            assert (response.text, "ratelimit" in response.headers) == ("put", False)

    async def test_functions_take_the_request_of_aiohttp(self) -> None:
        @web.middleware
        async def authenticate(request: web.Request, handler: Any) -> web.StreamResponse:
            request[USER] = request.headers.get("x-user", "nobody")
            response: web.StreamResponse = await handler(request)
            return response

        async def quota(request: web.Request) -> str | None:
            return f"{request.query['quota']}/minute" if "quota" in request.query else None

        key = by_all(lambda request: request[USER], lambda request: by_route()(scope_of(request)))
        limited = limit("1/minute", key=key, quota=quota)(ok)
        async with aiohttp_client(middlewares=[authenticate], item_n=limited) as client:
            codes = [
                (await client.get(path, headers={"x-user": user})).status_code
                for path, user in (("item/1", "a"), ("item/2", "a"), ("item/1", "b"))
            ]
            assert codes == [200, 429, 200]
            response = await client.get("item/1?quota=5", headers={"x-user": "c"})
            assert policies(response) == {"per-minute": 5}

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

    async def test_default_names_on_a_given_store(self) -> None:
        store = MemoryStore()
        limited = limit("9/minute", store=store)(ok)
        async with aiohttp_client(limit("9/minute", store=store), limited=limited) as client:
            await client.get("limited")
        for name in ("application", f"{__name__}.ok"):
            assert Limiter("9/minute", name=name, store=store).check("127.0.0.1", 0).remaining == 8

    async def test_body_sent_after_the_handler_holds_its_place(self) -> None:
        limiter = AsyncLimiter(concurrent(1, lease="60s"))
        free: list[bool] = []

        async def parts() -> AsyncIterator[bytes]:
            free.append(bool(await limiter.check("127.0.0.1")))
            yield b"a"

        async def stream(request: web.Request) -> web.StreamResponse:
            return web.Response(body=parts())

        async with aiohttp_client(limit(limiter), stream=stream) as client:
            assert [(await client.get("stream")).text for _ in range(2)] == ["a", "a"]
        assert free == [False, False]

    async def test_client_that_leaves_frees_its_place(self, caplog: pytest.LogCaptureFixture) -> None:
        limiter = AsyncLimiter(concurrent(1, lease="60s"))
        gone = asyncio.Event()

        async def parts() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield bytes(100_000)
            finally:
                gone.set()

        async def stream(request: web.Request) -> web.StreamResponse:
            return web.Response(body=parts())

        async with aiohttp_client(limit(limiter), stream=stream) as client:
            async with client.stream("GET", "stream") as response:
                assert response.status_code == 200
            await gone.wait()
            while not await limiter.check("127.0.0.1"):  # noqa: ASYNC110  # a release has no event
                await asyncio.sleep(0)
        assert not [record for record in caplog.records if record.levelname == "ERROR"]

    async def test_body_that_fails_does_not_look_complete(self) -> None:
        limiter = AsyncLimiter(concurrent(1, lease="60s"))

        async def parts() -> AsyncIterator[bytes]:
            yield b"a"
            raise ConnectionResetError("the source of the body failed")

        async def stream(request: web.Request) -> web.StreamResponse:
            return web.Response(body=parts())

        async with aiohttp_client(limit(limiter), stream=stream) as client:
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get("stream")
            assert await limiter.check("127.0.0.1")

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
