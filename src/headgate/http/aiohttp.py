"""Limits for aiohttp's server.

    install(app, limit("100/minute", default=True))

    @limit("5/minute", count={401})
    async def login(request): ...

    @exempt
    async def health(request): ...

A limit decorates functions and methods, including those of a `web.View`. All handlers decorated with the same object share
one count. The functions of a limit (`key`, `cost`, …) take the request and may be coroutine functions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import wraps
from types import SimpleNamespace
from typing import Any, Unpack

from headgate import AsyncLimiter, Rule
from headgate._checks import check_kind
from headgate._extras import needing
from headgate.decision import Decision
from headgate.errors import ConfigError, CostTooHigh, RateLimited
from headgate.http.exchange import SERVER_ERROR, ASGIExchange, nowhere
from headgate.http.headers import put_fields
from headgate.http.limit import LimitDefaults, ViewOptions, on_scope
from headgate.http.problems import Answer
from headgate.http.view_limits import DeclaredLimit, check_order, limits_around, watch
from headgate.http.view_limits import exempt as exempt

with needing("headgate.http.aiohttp", "aiohttp"):
    from aiohttp import web

__all__ = ["HandlerLimit", "decision", "exempt", "install", "limit"]

EXCHANGE = web.RequestKey("headgate", ASGIExchange)
"""Request key under which the exchange is stored."""

Handler = Callable[..., Awaitable[web.StreamResponse]]


def limit(
    *rules: str | Rule | AsyncLimiter,
    default: bool = False,
    **options: Unpack[ViewOptions],
) -> HandlerLimit:
    """Return a decorator that limits handlers; `install` takes it as a limit of the application.

    The arguments are those of `headgate.http.flask.limit`.
    """
    seen = on_scope(options, scope_of)
    return HandlerLimit(rules, default, seen)


DEFAULTS: web.AppKey[LimitDefaults] = web.AppKey("headgate.defaults", dict)  # type: ignore[arg-type]
"""Key of the defaults of an application."""


def decision(request: web.Request) -> Decision | None:
    """Return the decision of the most recent limit checked for a request; `None` if no limit was checked."""
    exchange: ASGIExchange | None = request.get(EXCHANGE)
    return None if exchange is None else exchange.decision


class HandlerLimit(DeclaredLimit):
    """A decorator that checks a limiter; created by `limit`."""

    def __call__(self, handler: Handler) -> Handler:
        if self.default:
            raise ConfigError("default=True is for limits of applications, given to install")
        self.named(f"{handler.__module__}.{handler.__qualname__}", AsyncLimiter)

        @wraps(handler)
        async def limited(*args: Any) -> web.StreamResponse:
            last = args[-1]  # a method's last argument is the request; a View carries its own request
            await self.decide(last.request if isinstance(last, web.View) else last)
            return await handler(*args)

        self.mark(limited, handler)
        return limited

    async def decide(self, request: web.Request) -> None:
        """Check a request against the limit; raise a response if it is refused."""
        exchange: ASGIExchange | None = request.get(EXCHANGE)
        if exchange is None:
            raise ConfigError("a handler has a limit, but the application has none: call install(app) once")
        self.use_defaults(request.config_dict.get(DEFAULTS, LimitDefaults()))
        own = self.limit_for(AsyncLimiter)
        if own.exempt is None or not own.exempt(request):
            answer = await exchange.decide(own, scope_of(request), request)
            if answer is not None:
                raise RefusedRequest(answer)


class RefusedRequest(Exception):
    """A refused request; caught by the middleware."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


def install(
    app: web.Application, *limits: str | Rule | AsyncLimiter | HandlerLimit, **defaults: Unpack[LimitDefaults]
) -> None:
    """Add the fields to every response of an application, answer refusals, and apply limits to all its requests.

    Call it after adding the middlewares that must run first, such as authentication. `store=`, `on_store_error=`,
    `deadline=` and `hooks=` are defaults of all limits that do not have their own.
    """
    check_kind("install", app, web.Application, "for an application of aiohttp")
    outer = [found if isinstance(found, HandlerLimit) else limit(found) for found in limits]
    app[DEFAULTS] = defaults
    for found in outer:
        found.use_defaults(defaults)
        found.named("application", AsyncLimiter)

    @web.middleware
    async def rate_limits(request: web.Request, handler: Handler) -> web.StreamResponse:
        outer_exchange: ASGIExchange | None = request.get(EXCHANGE)  # created by a parent application
        exchange = request[EXCHANGE] = outer_exchange or ASGIExchange(nowhere)
        route_handler = request.match_info.handler
        own = getattr(route_handler, request.method.lower(), None) or route_handler  # for a View, its method
        try:
            for found in limits_around(outer, own, None):
                await found.decide(request)
            response = await handler(request)
            if exchange.places and outer_exchange is None:
                await _send(request, response)  # the places are released when the body was sent
            return response
        except RefusedRequest as refused:
            return _response(refused.answer)
        except (RateLimited, CostTooHigh) as error:
            accept = request.headers.get("Accept", "").encode("latin-1", "replace")
            return _response(exchange.raised(error, accept))
        except web.HTTPException:
            raise  # a response with its own status
        except Exception:  # units on hold are settled as for a 500
            if outer_exchange is None:
                await exchange.settle(SERVER_ERROR)
            raise
        finally:
            if outer_exchange is None:
                await exchange.end()

    watch(app, handlers_of)
    app.middlewares.append(rate_limits)
    app.on_startup.append(_check)
    app.on_response_prepare.append(_put_fields)


async def _send(request: web.Request, response: web.StreamResponse) -> None:
    try:
        await response.prepare(request)
        await response.write_eof()
    except ConnectionError:
        if request.transport is not None and not request.transport.is_closing():
            raise  # by the body; aiohttp itself detects that the client disconnected


async def _check(app: web.Application) -> None:
    check_order(handlers_of(app))


async def _put_fields(request: web.Request, response: web.StreamResponse) -> None:
    exchange: ASGIExchange | None = request.get(EXCHANGE)
    if exchange is not None:
        await exchange.settle(response.status)
        put_fields(response.headers, exchange.asked)


def handlers_of(app: web.Application) -> Iterator[Any]:
    """Yield the handler of every route of an application and its sub-applications."""
    return (route.handler for route in app.router.routes())


def scope_of(request: web.Request) -> dict[str, Any]:
    """Return a request as an ASGI scope, for key functions that take one."""
    resource = request.match_info.route.resource
    return {
        "type": "http",
        "method": request.method,
        "path": request.path,
        "query_string": request.query_string.encode(),
        "headers": [(name.lower(), value) for name, value in request.raw_headers],
        "client": (request.remote, 0) if request.remote else None,
        "route": None if resource is None else SimpleNamespace(path=resource.canonical),
    }


def _response(answer: Answer) -> web.Response:
    return web.Response(body=answer.body, status=answer.status, headers=answer.headers)
