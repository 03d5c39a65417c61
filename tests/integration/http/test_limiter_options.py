"""Limits of every framework take the options of the limiter that they create from rules; `install` sets defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiohttp.test_utils
import flask as flask_framework
import pytest
from aiohttp import web
from django.test import override_settings
from fastapi import Depends, FastAPI

from headgate import AsyncLimiter, ConfigError, Hook, Limiter, MemoryStore
from headgate.http import aiohttp as aiohttp_limits
from headgate.http import asgi, django, fastapi, flask, rest_framework, wsgi
from tests.integration.http.clients import client_of
from tests.unit.flavours import close, done

UNREACHABLE = "redis://127.0.0.1:1"

VIEWS: dict[str, tuple[Callable[..., Any], type]] = {
    "fastapi": (lambda *rules, **options: fastapi.limit(*rules, **options).limiter, AsyncLimiter),
    "flask": (lambda *rules, **options: flask.limit(*rules, **options).limit_for(Limiter).limiter, Limiter),
    "django": (lambda *rules, **options: django.limit(*rules, **options).limit_for(Limiter).limiter, Limiter),
    "async django": (
        lambda *rules, **options: django.limit(*rules, **options).limit_for(AsyncLimiter).limiter,
        AsyncLimiter,
    ),
    "rest framework": (
        lambda *rules, **options: rest_framework.throttle(*rules, **options).limit.limiter,
        Limiter,
    ),
    "aiohttp": (
        lambda *rules, **options: aiohttp_limits.limit(*rules, **options).limit_for(AsyncLimiter).limiter,
        AsyncLimiter,
    ),
}
MIDDLEWARES: dict[str, tuple[Callable[..., Any], type]] = {
    "asgi": (
        lambda rule, **options: asgi.RateLimitMiddleware(None, rule, **options).limit.limiter,
        AsyncLimiter,
    ),  # type: ignore[arg-type]
    "wsgi": (lambda rule, **options: wsgi.RateLimitMiddleware(None, rule, **options).limit.limiter, Limiter),  # type: ignore[arg-type]
}
every_limit = pytest.mark.parametrize(
    ("limiter_of", "kind"), [*VIEWS.values(), *MIDDLEWARES.values()], ids=[*VIEWS, *MIDDLEWARES]
)


class Calls(Hook):
    def __init__(self) -> None:
        self.count = 0

    def decided(self, call: Any, decision: Any, seconds: float) -> None:
        self.count += 1


@every_limit
async def test_limit_takes_options_of_its_limiter(limiter_of: Callable[..., Any], kind: type) -> None:
    options = {"on_store_error": "closed", "deadline": 0.5, "hooks": [calls := Calls()]}
    limiter = limiter_of("5/minute", name="x", store=UNREACHABLE, **options)
    decision = await done(limiter.hit("ada"))
    assert (decision.allowed, decision.degraded, calls.count) == (False, True, 1)
    await close(limiter)


@every_limit
def test_given_limiter_keeps_its_options(limiter_of: Callable[..., Any], kind: type) -> None:
    with pytest.raises(ConfigError, match=r"the limiter has its 'hooks' already: pass hooks= to the limiter"):
        limiter_of(kind("5/minute"), hooks=[Calls()])


async def call_fastapi(**defaults: Any) -> int:
    app = FastAPI()
    fastapi.install(app, **defaults)

    @app.get("/", dependencies=[Depends(fastapi.limit("1/minute"))])
    async def view() -> None:
        """Do nothing."""

    async with client_of(app) as client:
        return (await client.get("/")).status_code


async def call_flask(**defaults: Any) -> int:
    app = flask_framework.Flask("shop")
    flask.install(app, **defaults)
    app.add_url_rule("/", view_func=flask.limit("1/minute")(view))
    return app.test_client().get("/").status_code


async def call_aiohttp(**defaults: Any) -> int:
    app = web.Application()
    aiohttp_limits.install(app, **defaults)
    app.router.add_get("/", aiohttp_limits.limit("1/minute")(handler))
    async with aiohttp.test_utils.TestClient(aiohttp.test_utils.TestServer(app)) as client:
        return (await client.get("/")).status


def view() -> str:
    return "ok"


async def handler(request: web.Request) -> web.Response:
    return web.Response()


every_install = pytest.mark.parametrize("call", [call_fastapi, call_flask, call_aiohttp])


@every_install
async def test_install_sets_the_store_and_hooks_of_all_limits(call: Callable[..., Any]) -> None:
    """Two applications with the same store count together."""
    store, calls = MemoryStore(), Calls()
    assert [await call(store=store, hooks=[calls]) for _ in range(2)] == [200, 429]
    assert calls.count == 2


@every_install
async def test_install_sets_the_failure_policy_of_all_limits(call: Callable[..., Any]) -> None:
    assert await call(store=UNREACHABLE, deadline=0.5) == 200
    assert await call(store=UNREACHABLE, on_store_error="closed", deadline=0.5) == 503


def test_options_of_a_limit_override_the_defaults() -> None:
    own, default = MemoryStore(), MemoryStore()
    limit = flask.limit("1/minute", name="x", store=own, deadline=0.5)
    limit.use_defaults({"store": default, "deadline": 0.1})
    limiter = limit.limit_for(Limiter).limiter
    limiter.hit("ada")
    assert (len(own), len(default)) == (1, 0)


def test_django_settings_set_the_defaults_of_all_limits() -> None:
    store, calls = MemoryStore(), Calls()
    with override_settings(HEADGATE_DEFAULTS={"store": store, "hooks": [calls]}):
        for _ in range(2):
            limited = django.limit("1/minute")
            limited(view)
            limited.limit_for(Limiter).limiter.hit("ada")
        rest_framework.throttle("1/minute", name="reports").limit.limiter.hit("ada")
    assert (len(store), calls.count) == (2, 3)


def test_throttle_on_the_default_store_needs_a_name() -> None:
    """Throttles have no view to take a name from; two of them must not count together by accident."""
    with (
        override_settings(HEADGATE_DEFAULTS={"store": MemoryStore()}),
        pytest.raises(ConfigError, match="a throttle on a given store needs a name="),
    ):
        rest_framework.throttle("1/minute")
