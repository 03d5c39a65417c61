"""An application behind the middleware."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
from redis.asyncio import Redis
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from headgate.testing import FakeClock
from headgate_services.tiers import RateLimitMiddleware


async def _ok(request: Request) -> Response:
    return PlainTextResponse("ok")


async def _fails(request: Request) -> Response:
    return PlainTextResponse("sorry", 500)


async def _raises(request: Request) -> Response:
    raise RuntimeError("broken")


def application() -> Starlette:
    """Return an application without limits."""
    routes = [Route(path, _ok) for path in ("/", "/health", "/metrics", "/ok", "/health/deep")]
    return Starlette(routes=[*routes, Route("/fails", _fails), Route("/raises", _raises)])


class Signature:
    """Authentication for tests: `X-User: ada/pro` is the user ada with the tier pro."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        given = dict(scope.get("headers", ())).get(b"x-user")
        if given is not None:
            user_id, _, tier = given.decode().partition("/")
            user = SimpleNamespace(id=user_id, tier=tier) if tier else SimpleNamespace(id=user_id)
            scope.setdefault("state", {})["user"] = user
        await self.app(scope, receive, send)


@dataclass
class Limited:
    """An application behind the middleware, and clients of it."""

    app: Any
    clock: FakeClock
    address: str = field(default_factory=lambda: ".".join(["10", *(str(n) for n in secrets.token_bytes(3))]))

    async def get(self, path: str = "/ok", user: str = "", **headers: str) -> httpx.Response:
        """Send a request, as a user if given, from an address that no other test has."""
        if user:
            headers["X-User"] = user
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False, client=(self.address, 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://tiers.test") as client:
            return await client.get(path, headers=headers)

    async def statuses(self, count: int, path: str = "/ok", user: str = "") -> list[int]:
        """Send requests one after the other, and return their statuses."""
        return [(await self.get(path, user)).status_code for _ in range(count)]


def limited(client: Redis | None, *, atomic: bool = False, **options: Any) -> Limited:
    """Return an application behind a middleware with these options and a fake clock."""
    clock = options.setdefault("clock", FakeClock())
    middleware = RateLimitMiddleware(
        application(), redis_client=client, use_atomic_redis=atomic, deadline=30, **options
    )
    return Limited(Signature(middleware), clock)


Make = Callable[..., Limited]
