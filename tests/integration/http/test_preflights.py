"""CORS: preflights are never charged, at any edge; a CORS middleware around the limit adds its fields to refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import flask
import httpx
import pytest
from aiohttp import web
from django.core.handlers.asgi import ASGIHandler
from django.http import HttpResponse
from fastapi import Depends, FastAPI, Response
from rest_framework.views import APIView
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from headgate.http import asgi, wsgi
from headgate.http import django as django_limits
from headgate.http import fastapi as fastapi_limits
from headgate.http import flask as flask_limits
from headgate.http.rest_framework import throttle
from tests.integration.http.clients import client_of
from tests.integration.http.test_django import path, site
from tests.integration.http.test_other_frameworks import aiohttp_client

PREFLIGHT = {"origin": "https://page.example", "access-control-request-method": "POST"}
METHODS = ["GET", "OPTIONS"]


async def plain(request: Request) -> PlainTextResponse:
    return PlainTextResponse("ok")


@asynccontextmanager
async def in_thread(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Yield an asynchronous client of a WSGI application."""
    transport = httpx.WSGITransport(app, remote_addr="192.0.2.1")

    class Transport(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            given = httpx.Request(request.method, request.url, headers=request.headers)
            response = transport.handle_request(given)
            return httpx.Response(response.status_code, headers=response.headers, content=response.read())

    async with httpx.AsyncClient(transport=Transport(), base_url="http://service") as client:
        yield client


def starlette_site() -> Any:
    return client_of(
        asgi.RateLimitMiddleware(Starlette(routes=[Route("/", plain, methods=METHODS)]), "1/minute")
    )


def wsgi_site() -> Any:
    def app(environ: Any, start_response: Callable[..., Any]) -> list[bytes]:
        start_response("200 OK", [])
        return [b"ok"]

    return in_thread(wsgi.RateLimitMiddleware(app, "1/minute"))


def fastapi_site(*, installed: bool) -> Any:
    app = FastAPI(dependencies=[Depends(fastapi_limits.limit("1/minute"))])
    if installed:
        fastapi_limits.install(app)

    @app.api_route("/", methods=METHODS)
    async def home() -> Response:
        return Response("ok")

    return client_of(app)


def flask_site(*, whole: bool) -> Any:
    app = flask.Flask("service")
    flask_limits.install(app, *(["1/minute"] if whole else []))
    view: Any = lambda: "ok"  # noqa: E731
    view.__name__ = view.__qualname__ = "home"
    app.add_url_rule("/", view_func=view if whole else flask_limits.limit("1/minute")(view), methods=METHODS)
    return in_thread(app)


@asynccontextmanager
async def django_site(view: Any, *, is_async: bool, limits: Any = ()) -> AsyncIterator[httpx.AsyncClient]:
    sync_site = site(path("", view), limits=limits)
    with sync_site as client:
        if is_async:
            async with client_of(ASGIHandler()) as awaited_client:
                yield awaited_client
        else:
            async with in_thread(client._transport.app) as awaited_client:  # type: ignore[attr-defined]
                yield awaited_client


def django_view(request: Any) -> Any:
    return HttpResponse("ok")


def throttled_view() -> Any:
    class Home(APIView):  # type: ignore[misc]  # it has no types
        throttle_classes = (throttle("1/minute"),)

        def get(self, request: Any) -> Any:
            return django_view(request)

        def options(self, request: Any) -> Any:
            return django_view(request)

    return Home.as_view()


async def aiohttp_handler(request: web.Request) -> web.StreamResponse:
    return web.Response(text="ok")


EDGES: dict[str, Callable[[], AbstractAsyncContextManager[httpx.AsyncClient]]] = {
    "asgi": starlette_site,
    "wsgi": wsgi_site,
    "fastapi": lambda: fastapi_site(installed=False),
    "fastapi, installed": lambda: fastapi_site(installed=True),
    "flask": lambda: flask_site(whole=False),
    "flask, whole application": lambda: flask_site(whole=True),
    "django": lambda: django_site(django_limits.limit("1/minute")(django_view), is_async=False),
    "django, site": lambda: django_site(django_view, is_async=False, limits=["1/minute"]),
    "django, asgi": lambda: django_site(django_view, is_async=True, limits=["1/minute"]),
    "rest framework": lambda: django_site(throttled_view(), is_async=False),
    "rest framework, asgi": lambda: django_site(throttled_view(), is_async=True),
    "aiohttp": lambda: aiohttp_client("1/minute", **{"": aiohttp_handler}),
}


@pytest.mark.parametrize("edge", EDGES)
async def test_preflights_are_not_charged(edge: str) -> None:
    async with EDGES[edge]() as client:
        for _ in range(3):
            assert (await client.options("/", headers=PREFLIGHT)).status_code == 200
        assert [(await client.get("/")).status_code for _ in range(2)] == [200, 429]
        assert (await client.options("/", headers=PREFLIGHT)).status_code == 200
        for missing in PREFLIGHT:
            other = {name: value for name, value in PREFLIGHT.items() if name != missing}
            assert (await client.options("/", headers=other)).status_code == 429
        assert (await client.get("/", headers=PREFLIGHT)).status_code == 429


async def test_outer_cors_middleware_adds_its_headers_to_refusals() -> None:
    allowed: dict[str, Any] = {
        "allow_origins": ["*"],
        "allow_methods": ["*"],
        "expose_headers": ["Retry-After", "RateLimit"],
    }
    limited = [
        Middleware(CORSMiddleware, **allowed),
        Middleware(asgi.RateLimitMiddleware, limiter="1/minute"),
    ]
    added = FastAPI(routes=[Route("/", plain)])
    added.add_middleware(asgi.RateLimitMiddleware, limiter="1/minute")
    added.add_middleware(CORSMiddleware, **allowed)
    depending = FastAPI(dependencies=[Depends(fastapi_limits.limit("1/minute"))])
    depending.add_middleware(CORSMiddleware, **allowed)
    fastapi_limits.install(depending)

    @depending.get("/")
    async def home() -> str:
        return "ok"

    for app in (Starlette(routes=[Route("/", plain)], middleware=limited), added, depending):
        async with client_of(app) as client:
            assert (await client.options("/", headers=PREFLIGHT)).status_code == 200
            responses = [await client.get("/", headers={"origin": "https://page.example"}) for _ in range(2)]
        assert [response.status_code for response in responses] == [200, 429]
        for response in responses:
            assert response.headers["access-control-allow-origin"] == "*"
            assert response.headers["access-control-expose-headers"] == "Retry-After, RateLimit"
