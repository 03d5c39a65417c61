"""The same small application in every framework, so that one test proves a promise at every edge."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import flask
import httpx
from aiohttp import web
from aiohttp.test_utils import TestServer as AiohttpServer
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.http import HttpResponse, StreamingHttpResponse
from django.test import override_settings
from django.urls import path as django_path
from fastapi import Depends, FastAPI
from rest_framework.views import APIView
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from headgate import AsyncLimiter, CostTooHigh, Decision, Limiter, RateLimited
from headgate.http import aiohttp as aiohttp_limits
from headgate.http import asgi, rest_framework, wsgi
from headgate.http import django as django_limits
from headgate.http import fastapi as fastapi_limits
from headgate.http import flask as flask_limits
from tests.integration.http.clients import ADDRESS, client_of

METHODS = ["GET", "OPTIONS"]
PATHS = ("", "status/204", "status/401", "status/403", "broken", "raised", "stream")
RATE_LIMITS = "headgate.http.django.rate_limits"


@dataclass
class App:
    """The application: it answers on `PATHS`.

    Attributes:
        reached: The number of requests that reached it.
        while_streaming: Called while `/stream` is being sent.
        reports: The limiter of `/raised`, whose refusals are raised; the header field `x-cost` is the cost.
    """

    reached: int = 0
    while_streaming: Callable[[], object] = lambda: None
    reports: Limiter = field(default_factory=lambda: Limiter("1/hour"))

    def answer(self, path: str, cost: str | None) -> int:
        """Return the status of the response to a request."""
        self.reached += 1
        name, _, code = path.strip("/").partition("/")
        if name == "broken":
            raise RuntimeError("broken")
        if name == "raised":
            self.reports.hit("report", int(cost or 1)).raise_if_denied()
        return 404 if name == "nowhere" else int(code or 200)

    def parts(self) -> Iterator[bytes]:
        """Yield the body of `/stream`."""
        self.while_streaming()
        yield b"part"

    async def async_parts(self) -> AsyncIterator[bytes]:
        """Yield the body of `/stream`."""
        for part in self.parts():
            yield part


def body_of(decision: Decision | None) -> str:
    """Return the body of other responses: the remaining units of the most recent decision."""
    return "none" if decision is None else str(decision.remaining)


# --- Frameworks ---------------------------------------------------------------------------------------------------------

Views = Mapping[str, Sequence[Any]]
"""The limits of the view on each path, outermost first; `None` is an exemption."""

Run = Callable[[App, Sequence[Any], Views], AbstractAsyncContextManager[httpx.AsyncClient]]
"""Runs the application with limits of everything and limits of views, and yields a client."""


@asynccontextmanager
async def wsgi_client_of(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Yield an asynchronous client of a WSGI application; an exception of the application is a 500, as of a server."""
    transport = httpx.WSGITransport(app, remote_addr=ADDRESS, raise_app_exceptions=False)

    class Transport(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            given = httpx.Request(request.method, request.url, headers=request.headers)
            try:
                response = transport.handle_request(given)
            except Exception:  # noqa: BLE001  # as a server does
                return httpx.Response(500)
            content = response.read()
            response.close()
            return httpx.Response(response.status_code, headers=response.headers, content=content)

    async with httpx.AsyncClient(transport=Transport(), base_url="http://service") as client:
        yield client


def starlette_view(app: App) -> Any:
    async def view(request: Request) -> Response:
        status = app.answer(request.url.path, request.headers.get("x-cost"))
        if request.url.path == "/stream":
            return StreamingResponse(app.async_parts())
        exchange = request.scope.get("headgate")
        return Response(body_of(exchange and exchange.decision), status)

    return view


@asynccontextmanager
async def run_starlette(app: App, limits: Sequence[Any], views: Views) -> AsyncIterator[httpx.AsyncClient]:
    handlers: Any = dict.fromkeys((RateLimited, CostTooHigh), asgi.answer_refusal)
    routes = [Route(f"/{path}", starlette_view(app), methods=METHODS) for path in views]
    made: Any = Starlette(routes=routes, exception_handlers=handlers)
    for limit in reversed(limits):
        made = limit(made)
    async with client_of(made) as client:
        yield client


@asynccontextmanager
async def run_wsgi(app: App, limits: Sequence[Any], views: Views) -> AsyncIterator[httpx.AsyncClient]:
    def made(environ: Any, start_response: Callable[..., Any]) -> Iterable[bytes]:
        status = app.answer(environ["PATH_INFO"], environ.get("HTTP_X_COST"))
        start_response(f"{status} X", [("Content-Type", "text/plain")])
        return app.parts() if environ["PATH_INFO"] == "/stream" else [b"ok"]

    limited: Any = made
    for limit in reversed(limits):
        limited = limit(limited)
    async with wsgi_client_of(limited) as client:
        yield client


@asynccontextmanager
async def run_fastapi(app: App, limits: Sequence[Any], views: Views) -> AsyncIterator[httpx.AsyncClient]:
    made = FastAPI(dependencies=[Depends(limit) for limit in limits])
    fastapi_limits.install(made)
    for path, own in views.items():
        depends = [Depends(limit or fastapi_limits.exempt) for limit in own]
        made.api_route(f"/{path}", methods=METHODS, dependencies=depends)(starlette_view(app))
    async with client_of(made) as client:
        yield client


@asynccontextmanager
async def run_flask(app: App, limits: Sequence[Any], views: Views) -> AsyncIterator[httpx.AsyncClient]:
    made = flask.Flask("service")
    flask_limits.install(made, *limits)
    for path, own in views.items():

        def view() -> Any:
            status = app.answer(flask.request.path, flask.request.headers.get("x-cost"))
            body = app.parts() if flask.request.path == "/stream" else body_of(flask_limits.decision())
            return flask.Response(body, status)

        limited = decorated(flask_limits, view, own)
        made.add_url_rule(f"/{path}", endpoint=path or "home", view_func=limited, methods=METHODS)
    async with wsgi_client_of(made) as client:
        yield client


def django_view(app: App) -> Any:
    def view(request: Any) -> Any:
        status = app.answer(request.path, request.headers.get("x-cost"))
        if request.path == "/stream":
            return StreamingHttpResponse(app.async_parts() if hasattr(request, "scope") else app.parts())
        return HttpResponse(body_of(django_limits.decision(request)), status=status)

    return view


def async_django_view(app: App) -> Any:
    sync_view = django_view(app)

    async def view(request: Any) -> Any:
        return sync_view(request)

    return view


def rest_framework_view(app: App, limits: Sequence[Any]) -> Any:
    class Everything(APIView):  # type: ignore[misc]  # it has no types
        throttle_classes = tuple(limits)

        def get(self, request: Any) -> Any:
            return django_view(app)(request._request)

        options = get

    return Everything.as_view()


@asynccontextmanager
async def run_django(
    app: App,
    limits: Sequence[Any],
    views: Views,
    *,
    make: Callable[[App], Any] | None = None,
    is_async: bool = False,
    middleware: Sequence[str] = (RATE_LIMITS,),
) -> AsyncIterator[httpx.AsyncClient]:
    urls: Any = ModuleType("urls")
    urls.urlpatterns = [
        django_path(path, decorated(django_limits, make(app), own) if make else rest_framework_view(app, own))
        for path, own in views.items()
    ]
    with override_settings(ROOT_URLCONF=urls, MIDDLEWARE=list(middleware), HEADGATE_LIMITS=list(limits)):
        async with client_of(ASGIHandler()) if is_async else wsgi_client_of(WSGIHandler()) as client:
            yield client


@asynccontextmanager
async def run_aiohttp(app: App, limits: Sequence[Any], views: Views) -> AsyncIterator[httpx.AsyncClient]:
    made = web.Application()
    aiohttp_limits.install(made, *limits)
    for path, own in views.items():

        async def view(request: web.Request) -> web.StreamResponse:
            status = app.answer(request.path, request.headers.get("x-cost"))
            if request.path == "/stream":
                response = web.StreamResponse()
                await response.prepare(request)
                for part in app.parts():
                    await response.write(part)
                return response
            return web.Response(text=body_of(aiohttp_limits.decision(request)), status=status)

        made.router.add_route("*", f"/{path}", decorated(aiohttp_limits, view, own))
    async with AiohttpServer(made) as server, httpx.AsyncClient(base_url=str(server.make_url("/"))) as client:
        yield client


def decorated(framework: Any, view: Any, limits: Sequence[Any]) -> Any:
    """Return a view with its limits."""
    for limit in reversed(limits):
        view = framework.exempt(view) if limit is None else limit(view)
    return view


# --- Edges --------------------------------------------------------------------------------------------------------------


class Edge(NamedTuple):
    """A place where a framework checks limits.

    Attributes:
        run: Runs the application in the framework.
        kind: The class of its limiters.
        make: Makes a limit from a rule or limiter, and options.
        is_whole: Whether the limits are those of the whole application, not of its views.
        sees_errors: Whether it adds fields to the response to an error in the application.
        has_problems: Whether its refusals are our problem documents, rather than responses of the framework.
    """

    run: Run
    kind: type[Limiter] | type[AsyncLimiter]
    make: Callable[..., Any]
    is_whole: bool = False
    sees_errors: bool = True
    has_problems: bool = True

    def serve(
        self, app: App, limits: Sequence[Any], **options: Any
    ) -> AbstractAsyncContextManager[httpx.AsyncClient]:
        """Run the application with these limits, each with these options."""
        made = [self.make(limit, **options) for limit in limits]
        own = () if self.is_whole else made
        return self.run(app, made if self.is_whole else (), dict.fromkeys(PATHS, own))


def middleware(kind: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes limits of an ASGI or WSGI application."""
    return lambda limit, **options: lambda app: kind(app, limit, **options)


async_django = partial(run_django, make=async_django_view, is_async=True)
sync_django = partial(run_django, make=django_view)
EDGES = {
    "asgi": Edge(run_starlette, AsyncLimiter, middleware(asgi.RateLimitMiddleware), is_whole=True),
    "wsgi": Edge(run_wsgi, Limiter, middleware(wsgi.RateLimitMiddleware), is_whole=True, sees_errors=False),
    "fastapi": Edge(run_fastapi, AsyncLimiter, fastapi_limits.limit),
    "flask": Edge(run_flask, Limiter, flask_limits.limit, is_whole=True),
    "flask views": Edge(run_flask, Limiter, flask_limits.limit),
    "django": Edge(sync_django, Limiter, django_limits.limit, is_whole=True),
    "django, asgi": Edge(async_django, AsyncLimiter, django_limits.limit, is_whole=True),
    "django views": Edge(sync_django, Limiter, django_limits.limit),
    "django views, asgi": Edge(async_django, AsyncLimiter, django_limits.limit),
    "django views alone": Edge(
        partial(sync_django, middleware=()), Limiter, django_limits.limit, sees_errors=False
    ),
    "django views alone, asgi": Edge(
        partial(async_django, middleware=()), AsyncLimiter, django_limits.limit, sees_errors=False
    ),
    "rest framework": Edge(run_django, Limiter, rest_framework.throttle, has_problems=False),
    "rest framework, asgi": Edge(
        partial(run_django, is_async=True), Limiter, rest_framework.throttle, has_problems=False
    ),
    "aiohttp": Edge(run_aiohttp, AsyncLimiter, aiohttp_limits.limit, is_whole=True),
    "aiohttp views": Edge(run_aiohttp, AsyncLimiter, aiohttp_limits.limit),
}
