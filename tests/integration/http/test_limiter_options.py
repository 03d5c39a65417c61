"""Limits of every framework take the options of the limiter that they create from rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headgate import AsyncLimiter, ConfigError, Hook, Limiter
from headgate.http import aiohttp, asgi, django, fastapi, flask, rest_framework, wsgi
from tests.integration.http import clients  # noqa: F401  # configures Django
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
        lambda *rules, **options: aiohttp.limit(*rules, **options).limit_for(AsyncLimiter).limiter,
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


@pytest.mark.parametrize(("limiter_of", "kind"), VIEWS.values(), ids=VIEWS)
async def test_failure_policy_and_deadline_are_those_of_the_limit(
    limiter_of: Callable[..., Any], kind: type
) -> None:
    limiter = limiter_of("5/minute", name="x", store=UNREACHABLE, on_store_error="closed", deadline=0.5)
    decision = await done(limiter.hit("ada"))
    assert (decision.allowed, decision.degraded) == (False, True)
    await close(limiter)


@every_limit
async def test_hooks_of_the_limit_are_called(limiter_of: Callable[..., Any], kind: type) -> None:
    calls = Calls()
    await done(limiter_of("5/minute", hooks=[calls]).hit("ada"))
    assert calls.count == 1


@every_limit
def test_given_limiter_has_its_options_already(limiter_of: Callable[..., Any], kind: type) -> None:
    with pytest.raises(ConfigError, match=r"the limiter has its 'hooks' already: pass hooks= to the limiter"):
        limiter_of(kind("5/minute"), hooks=[Calls()])
