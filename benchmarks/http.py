"""The CPU time that a limit adds to one request, in this process: Starlette, FastAPI, Flask and Django.

    python -m benchmarks.http [--quick]

Every peer counts in memory and is configured as its documentation recommends; a comment names the page. A request is a call
of the ASGI or WSGI application without a server or a client, so that only the application and the limit are measured. The
cost of a limit is the difference to the same application without a limit: the median of the differences within each round.
Headgate writes all header fields; of the others only slowapi and flask-limiter can write some of them, and do so here.
"""

from __future__ import annotations

import asyncio
import io
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from types import ModuleType
from typing import Any

from benchmarks.harness import (
    HEADGATE,
    Runner,
    Scale,
    Section,
    Target,
    announce,
    each,
    interleave,
    main,
    notes,
    number,
    table,
)

BARE = "no limit"
FLOOR = "floor: empty dependency"
PLENTY = 1_000_000_000
TIMES_LESS = {"Starlette": 2.0, "FastAPI": 1.0, "Flask": 3.0, "Django": 3.0}
"""Minimum ratio of the cost of the best peer to the cost of Headgate. In FastAPI its dependencies dominate both costs."""

Build = Callable[[int], Any]
"""Builds an application that admits a number of requests per hour; an application without a limit ignores the number."""
Send = Callable[[Any, int, list[int]], float]
"""Sends requests to an application, appends their statuses to a list, and returns CPU microseconds per request."""


# --- Starlette --------------------------------------------------------------------------------------------------------


def starlette(**arguments: Any) -> Any:
    """Build the application without a limit."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    async def home(request: Request) -> PlainTextResponse:
        return PlainTextResponse("hello")

    return Starlette(routes=[Route("/", home)], **arguments)


def starlette_headgate(limit: int) -> Any:
    """Build Headgate, with all fields."""
    from headgate.http.asgi import RateLimitMiddleware

    return RateLimitMiddleware(starlette(), f"{limit}/hour")


# https://pypi.org/project/traffik: a backend with its lifespan, ThrottleMiddleware, HTTPThrottle; no fields by default.
def starlette_traffik(limit: int) -> Any:
    """Build traffik as a middleware."""
    from starlette.middleware import Middleware
    from traffik import HTTPThrottle
    from traffik.backends.inmemory import InMemoryBackend
    from traffik.middleware import ThrottleMiddleware

    backend = InMemoryBackend(namespace=f"starlette-{limit}")
    throttle = HTTPThrottle(f"starlette-{limit}", rate=f"{limit}/hour")
    app = starlette(
        middleware=[Middleware(ThrottleMiddleware, middleware_throttles=[throttle], backend=backend)]
    )
    return Initialised(app, backend)


class Initialised:
    """An application whose backend is initialised by the first request, because no server runs its lifespan."""

    def __init__(self, app: Any, backend: Any) -> None:
        self.app, self.backend, self.is_ready = app, backend, False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if not self.is_ready:
            await self.backend.initialize()
            self.is_ready = True
        await self.app(scope, receive, send)


# --- FastAPI ----------------------------------------------------------------------------------------------------------


def fastapi(dependency: Any = None) -> Any:
    """Build the application; its route may have a dependency."""
    from fastapi import Depends, FastAPI

    app = FastAPI()

    @app.get("/", dependencies=[Depends(dependency)] if dependency else [])
    async def home() -> dict[str, str]:
        return {"hello": "world"}

    return app


def fastapi_floor(limit: int) -> Any:
    """Build the application with a dependency that does nothing."""

    async def nothing() -> None: ...

    return fastapi(nothing)


def fastapi_headgate(limit: int) -> Any:
    """Build Headgate, with all fields on every response."""
    from headgate.http.fastapi import install
    from headgate.http.fastapi import limit as limit_to

    app = fastapi(limit_to(f"{limit}/hour"))
    install(app)
    return app


# https://pypi.org/project/traffik, "Quickstart": Depends(throttle).
def fastapi_traffik(limit: int) -> Any:
    """Build traffik as a dependency."""
    from traffik import HTTPThrottle
    from traffik.backends.inmemory import InMemoryBackend

    backend = InMemoryBackend(namespace=f"fastapi-{limit}")
    throttle = HTTPThrottle(f"fastapi-{limit}", rate=f"{limit}/hour", backend=backend)
    return Initialised(fastapi(throttle), backend)


# https://throttled-py.readthedocs.io: it does not support FastAPI; this is the dependency that a user would write.
def fastapi_throttled(limit: int) -> Any:
    """Build throttled-py as a dependency."""
    import throttled.asyncio as package
    from fastapi import HTTPException, Request

    throttle = package.Throttled(
        using="sliding_window",
        quota=package.per_duration(timedelta(hours=1), limit, limit),
        store=package.MemoryStore(),
    )

    async def limited(request: Request) -> None:
        result = await throttle.limit(request.client.host if request.client else "")
        if result.limited:
            raise HTTPException(429)

    limited.__annotations__["request"] = Request  # FastAPI would resolve the name in this module
    return fastapi(limited)


# https://slowapi.readthedocs.io, "Quick start": a decorator, with `request` and `response` as arguments.
def fastapi_slowapi(limit: int) -> Any:
    """Build slowapi as a decorator, with its fields."""
    from fastapi import FastAPI, Request, Response
    from slowapi import Limiter, _rate_limit_exceeded_handler
    from slowapi.errors import RateLimitExceeded
    from slowapi.util import get_remote_address

    limiter = Limiter(key_func=get_remote_address, headers_enabled=True)
    app = FastAPI()
    app.state.limiter = limiter
    app.add_exception_handler(RateLimitExceeded, _rate_limit_exceeded_handler)

    async def home(request: Any, response: Any) -> dict[str, str]:
        return {"hello": "world"}

    home.__annotations__ |= {"request": Request, "response": Response}
    app.get("/")(limiter.limit(f"{limit}/hour")(home))
    return app


# --- Flask ------------------------------------------------------------------------------------------------------------


def flask(install: Callable[[Any, Callable[[], str]], Callable[[], str]] = lambda app, view: view) -> Any:
    """Build the application; a function may wrap its view in a limit."""
    from flask import Flask

    app = Flask("benchmark")

    def home() -> str:
        return "hello"

    app.add_url_rule("/", view_func=install(app, home), endpoint="home")
    return app


def flask_headgate(limit: int) -> Any:
    """Build Headgate, with all fields."""
    from headgate.http.flask import install
    from headgate.http.flask import limit as limit_to

    def limited(app: Any, view: Any) -> Any:
        install(app)
        return limit_to(f"{limit}/hour")(view)

    return flask(limited)


# https://flask-limiter.readthedocs.io, "Quick start": a decorator; fields are off by default.
def flask_limiter(limit: int) -> Any:
    """Build flask-limiter, with its fields."""
    from flask_limiter import Limiter
    from flask_limiter.util import get_remote_address

    def limited(app: Any, view: Any) -> Any:
        limiter = Limiter(get_remote_address, app=app, storage_uri="memory://", headers_enabled=True)
        return limiter.limit(f"{limit}/hour")(view)

    return flask(limited)


# --- Django -----------------------------------------------------------------------------------------------------------


def configure_django() -> None:
    """Configure Django for all sites; its cache is in memory by default."""
    import django
    from django.conf import settings

    logging.getLogger("django").setLevel(logging.CRITICAL)  # refusals are expected
    settings.configure(ALLOWED_HOSTS=["*"], LOGGING_CONFIG=None, MIDDLEWARE=[])
    django.setup()


def django_site(view: Any) -> Any:
    """Build a site with one view."""
    from django.conf import settings
    from django.core.handlers.wsgi import WSGIHandler
    from django.urls import path

    urls: Any = ModuleType("urls")
    urls.urlpatterns = [path("", view)]
    handler = WSGIHandler()

    def application(environ: Any, start_response: Any) -> Any:
        settings.ROOT_URLCONF = urls
        return handler(environ, start_response)

    return application


def hello(request: Any) -> Any:
    """Return a response: a minimal view."""
    from django.http import HttpResponse

    return HttpResponse("hello")


def django_headgate(limit: int) -> Any:
    """Build Headgate, with all fields."""
    from headgate.http.django import limit as limit_to

    return django_site(limit_to(f"{limit}/hour")(hello))


# https://django-ratelimit.readthedocs.io, "Using Django Ratelimit": a decorator; a refusal is a 403, without fields.
def django_ratelimit(limit: int) -> Any:
    """Build django-ratelimit."""
    from django_ratelimit.decorators import ratelimit

    return django_site(ratelimit(key="ip", rate=f"{limit}/h", group=str(limit))(hello))


ASGI: dict[str, dict[str, Build]] = {
    "Starlette": {
        BARE: lambda limit: starlette(),
        HEADGATE: starlette_headgate,
        "traffik": starlette_traffik,
    },
    "FastAPI": {
        BARE: lambda limit: fastapi(),
        FLOOR: fastapi_floor,
        HEADGATE: fastapi_headgate,
        "traffik": fastapi_traffik,
        "throttled-py": fastapi_throttled,
        "slowapi": fastapi_slowapi,
    },
}
WSGI: dict[str, dict[str, Build]] = {
    "Flask": {BARE: lambda limit: flask(), HEADGATE: flask_headgate, "flask-limiter": flask_limiter},
    "Django": {
        BARE: lambda limit: django_site(hello),
        HEADGATE: django_headgate,
        "django-ratelimit": django_ratelimit,
    },
}


# --- Measuring --------------------------------------------------------------------------------------------------------

SCOPE: dict[str, Any] = {
    "type": "http",
    "asgi": {"version": "3.0", "spec_version": "2.4"},
    "http_version": "1.1",
    "method": "GET",
    "scheme": "http",
    "path": "/",
    "raw_path": b"/",
    "query_string": b"",
    "root_path": "",
    "headers": [(b"host", b"service"), (b"accept", b"*/*"), (b"user-agent", b"benchmark")],
    "client": ("192.0.2.1", 1234),
    "server": ("service", 80),
}
ENVIRON: dict[str, Any] = {
    "REQUEST_METHOD": "GET",
    "SCRIPT_NAME": "",
    "PATH_INFO": "/",
    "QUERY_STRING": "",
    "SERVER_NAME": "service",
    "SERVER_PORT": "80",
    "SERVER_PROTOCOL": "HTTP/1.1",
    "HTTP_HOST": "service",
    "HTTP_ACCEPT": "*/*",
    "REMOTE_ADDR": "192.0.2.1",
    "wsgi.version": (1, 0),
    "wsgi.url_scheme": "http",
    "wsgi.errors": sys.stderr,
    "wsgi.multithread": True,
    "wsgi.multiprocess": False,
    "wsgi.run_once": False,
}


async def send_asgi(app: Any, calls: int, statuses: list[int]) -> float:
    """Send requests to an ASGI application; see `Send`."""

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scopes = [{**SCOPE, "state": {}} for _ in range(calls)]
    start = time.thread_time_ns()
    for scope in scopes:
        await app(scope, receive, send)
    return (time.thread_time_ns() - start) / calls / 1000


def send_wsgi(app: Any, calls: int, statuses: list[int]) -> float:
    """Send requests to a WSGI application; see `Send`."""

    def start_response(status: str, headers: Any, *error: Any) -> Any:
        statuses.append(int(status[:3]))
        return lambda part: None

    requests = [{**ENVIRON, "wsgi.input": io.BytesIO()} for _ in range(calls)]
    start = time.thread_time_ns()
    for request in requests:
        body = app(request, start_response)
        b"".join(body)
        if hasattr(body, "close"):
            body.close()
    return (time.thread_time_ns() - start) / calls / 1000


def measure(framework: str, builds: Mapping[str, Build], send: Send, calls: int, rounds: int) -> Section:
    """Measure the CPU time that each contender adds to an admitted request."""
    announce(f"a limit in {framework}")

    def prepare(item: tuple[str, Build]) -> Runner:
        name, build = item
        strict: list[int] = []
        send(build(1), 2, strict)
        if name not in (BARE, FLOOR) and strict not in ([200, 429], [200, 403]):
            raise RuntimeError(f"the statuses are {strict}, but the second request should be refused")
        return partial(_sample, send, build(PLENTY), calls)

    results = interleave(each({name: (name, build) for name, build in builds.items()}, prepare), rounds)
    added = {name: result.over(results[BARE]) for name, result in results.items()}
    rows = [[name, number(result.median, 1)] for name, result in added.items() if name != BARE]
    title = f"{framework}: CPU microseconds that a limit adds to a request"
    peers = {name: found.median for name, found in added.items() if name not in (BARE, FLOOR, HEADGATE)}
    best = min(peers, key=lambda name: peers[name])
    times = peers[best] / added[HEADGATE].median
    bound = TIMES_LESS[framework]
    targets = [Target(f"{framework}: best peer ÷ {HEADGATE}", bound, times, at_most=False, where=best)]
    return Section(
        framework, [table(title, ["", "admitted"], rows), *notes(added)], {"admitted": added}, targets
    )


def _sample(send: Send, app: Any, calls: int) -> float:
    statuses: list[int] = []
    taken = send(app, calls, statuses)
    if set(statuses) != {200}:
        raise RuntimeError(f"the statuses are {set(statuses)}, but all requests should be admitted")
    return taken


def run(scale: Scale) -> Iterator[Section]:
    """Measure each framework."""
    with asyncio.Runner() as loop:
        for name, builds in ASGI.items():
            calls = scale.calls // 10
            yield measure(name, builds, lambda *args: loop.run(send_asgi(*args)), calls, 3 * scale.rounds)
    configure_django()
    for name, builds in WSGI.items():
        yield measure(name, builds, send_wsgi, scale.calls // 10, 3 * scale.rounds)


if __name__ == "__main__":
    main("http", __doc__, run)
