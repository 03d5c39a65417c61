"""Limits as FastAPI dependencies.

    app = FastAPI(dependencies=[Depends(limit("100/minute", default=True))])
    install(app)

    @app.post("/login", dependencies=[Depends(limit("5/minute", count={401}))])
    async def login(): ...

    @app.get("/health", dependencies=[Depends(exempt)])
    async def health(): ...

A limit counts all requests to the routes that have it: to share one between routes, use the same object. The endpoint needs
no `request` argument; one that wants to know has the decision as the value of the dependency.

`install(app)` puts the fields on every response: errors, exceptions, streams and responses that the endpoint made itself. It
also shows refusals in the OpenAPI document, and lets outcomes be counted (`count=`). Without it, a dependency sees nothing
of the response but what FastAPI makes of the return value; refusals have all fields in any case.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from headgate import AsyncLimiter
from headgate._extras import needing
from headgate.clock import Clock
from headgate.decision import Decision
from headgate.errors import ConfigError
from headgate.http.asgi import KINDS
from headgate.http.exchange import (
    EXCHANGE,
    POLICY_VIOLATION,
    SERVER_ERROR,
    App,
    ASGIExchange,
    Message,
    Receive,
    Scope,
    Send,
    can_deny,
)
from headgate.http.headers import Field, Fields, all_fields
from headgate.http.keys import by_address, matched_route, takes_scope
from headgate.http.limit import Cost, Keys, Outcomes, RequestLimit, Tier, is_async
from headgate.http.openapi import add_refusals
from headgate.http.problems import Answer
from headgate.rules import Rule
from headgate.stores import AsyncStore

with needing("headgate.http.fastapi", "fastapi"):
    import fastapi.routing
    from fastapi import FastAPI, HTTPException, Response, WebSocket
    from fastapi.exception_handlers import http_exception_handler
    from fastapi.params import Depends
    from starlette.exceptions import WebSocketException
    from starlette.requests import HTTPConnection

__all__ = ["Limit", "RequestRefused", "exempt", "install", "limit"]


class RequestRefused(HTTPException):
    """A request that was not admitted.

    To answer in your own way, handle it with `app.exception_handler`, or the status 429, or every HTTPException.

    Attributes:
        answer: The response that it gets otherwise.
    """

    def __init__(self, answer: Answer, fields: list[Field]) -> None:
        headers = {name.decode(): value.decode() for name, value in fields}
        super().__init__(answer.status, headers=headers or None)
        self.answer = answer
        self.fields = fields


def limit(
    *rules: str | Rule | AsyncLimiter,
    key: Keys | Depends | None = None,
    cost: Cost | Depends = 1,
    tier: Tier | Depends = None,
    count: Outcomes | None = None,
    default: bool = False,
    exempt: Callable[[HTTPConnection], bool] | None = None,
    address: Callable[[Any], str] | None = None,
    fields: Fields | None = None,
    name: str | None = None,
    store: AsyncStore | str | None = None,
    clock: Clock | None = None,
) -> Limit:
    """Return a dependency that limits the routes which have it.

    Args:
        rules: Rules, or text like `"5/minute; 50/hour"`, decided together; or one limiter, perhaps of a policy file.
        key: Whose units: a function of the request, or one for each scope of the rules. By default the client's address.
        cost: How many units, as a number or a function of the request.
        tier: Which tier, as a name or a function of the request.
        count: Which statuses count, as `{401, 403}`, `range(200, 300)` or a function of the status. The units are held
            while the request is answered, and given back if the answer has another status. Needs `install`.
        default: Whether a route with a limit of its own, or a nearer default, does without this one.
        exempt: Which requests are let through unasked, as a function of the request.
        address: How the client's address is found; see `by_address`. Used by default, and where `key` returns `None`.
        fields: Which header fields to write; by default those that the limiter's policy asks for, or else all.
        name: The limiter's name; needed on a given store.
        store: Where it counts; by default in memory of its own.
        clock: Where time comes from.

    A function of the request may be a coroutine function. It can also be a dependency of its own, with `Depends(...)`
    around it, and then take anything that FastAPI provides.
    """
    if len(rules) == 1 and isinstance(rules[0], AsyncLimiter):
        if (name, store, clock) != (None, None, None):
            raise ConfigError("the limiter has its name, store and clock already")
        limiter = rules[0]
    else:
        plain = [rule for rule in rules if not isinstance(rule, AsyncLimiter)]
        if not plain or len(plain) < len(rules):
            raise ConfigError("give a limit either rules, like '5/minute', or one limiter")
        limiter = AsyncLimiter(*plain, name=name, store=store, clock=clock)
    return Limit(limiter, key, cost, tier, count, default, exempt, address, fields)


async def exempt() -> None:
    """Free a route from the limits of its application and routers: `dependencies=[Depends(exempt)]`."""


class Limit:
    """A dependency that asks a limiter; made by `limit`. Its value is the decision, or `None` where it does not apply.

    Attributes:
        limiter: The limiter that decides.
        default: Whether it gives way to a limit of the route's own.
    """

    def __init__(
        self,
        limiter: AsyncLimiter,
        key: Keys | Depends | None,
        cost: Cost | Depends,
        tier: Tier | Depends,
        count: Outcomes | None,
        default: bool,
        exempt: Callable[[HTTPConnection], bool] | None,
        address: Callable[[Any], str] | None,
        fields: Fields | None,
    ) -> None:
        self.limiter = limiter
        self.default = default
        given = {"key": key, "cost": cost, "tier": tier}
        injected = {name: part for name, part in given.items() if isinstance(part, Depends)}
        keys = key.values() if isinstance(key, Mapping) else (key,)
        functions = [part for part in (*keys, cost, tier, address) if callable(part)]
        # Mostly there is only the address to look at, which needs no more than the scope.
        self._takes_scope = exempt is None and not injected and all(map(takes_scope, functions))
        see = (lambda part, name="": part) if self._takes_scope else _seen
        self.request_limit = RequestLimit(
            limiter,
            key=see(key, "key"),
            cost=see(cost, "cost"),
            tier=see(tier, "tier"),
            count=count,
            exempt=see(exempt),
            address=see(address or by_address()),
            fields=fields,
        )
        self._last_route: object = None
        self._applies: dict[int, tuple[object, bool]] = {}
        self.__signature__ = _signature(injected)

    async def __call__(
        self, connection: HTTPConnection, response: Response, **injected: Any
    ) -> Decision | None:
        scope, request_limit = connection.scope, self.request_limit
        if (scope.get("route") is not self._last_route or "fastapi" in scope) and not self.applies(scope):
            return None
        request = scope if self._takes_scope else SimpleNamespace(connection=connection, **injected)
        if request_limit.exempt is not None and request_limit.exempt(request):
            return None
        exchange: ASGIExchange = scope.get(EXCHANGE) or self._unsent(scope)
        answer = await exchange.ask(request_limit, scope, request)
        if answer is not None:
            raise _refused(scope, exchange, answer)
        if isinstance(exchange, Unsent):
            exchange.show(response)
        return exchange.asked[-1][1]

    def applies(self, scope: Scope) -> bool:
        """Return whether the route of a request leaves this limit in force."""
        route = matched_route(scope)
        known = self._applies.get(id(route))
        if known is None or known[0] is not route:
            dependant = getattr(route, "dependant", None)
            known = route, dependant is None or self in active_limits(dependant)
            self._applies[id(route)] = known
        if known[1]:
            self._last_route = scope.get("route")
        return known[1]

    def _unsent(self, scope: Scope) -> Unsent:
        if self.request_limit.counts is not None:
            raise ConfigError("count= needs the status of the response: call install(app) once")
        if self.request_limit.version.limiter.units.has_places:
            raise ConfigError(
                "a concurrent rule holds until the response is sent, which only install(app) can see: call it once"
            )
        exchange = scope[EXCHANGE] = Unsent()
        return exchange


class Unsent(ASGIExchange):
    """An exchange in an application without `install`, which does not see the response."""

    def __init__(self) -> None:
        super().__init__(_nowhere)

    def show(self, response: Response) -> None:
        """Put the fields where FastAPI takes them from, for a response made of a return value."""
        fields = all_fields(self.asked)
        if len(self.asked) > 1:  # those of the limits before are among them
            names = {name for name, _ in fields}
            response.raw_headers[:] = [field for field in response.raw_headers if field[0] not in names]
        response.raw_headers += fields


async def _nowhere(message: Message) -> None:
    raise AssertionError("nothing is sent through an exchange that does not see the response")


def install(app: FastAPI) -> None:
    """Let every response of an application carry the fields, and show refusals in its OpenAPI document.

    Call it once, before the application serves; what is mounted in it is covered. To call it on a mounted FastAPI
    application as well completes that one's OpenAPI document.
    """
    if app.middleware_stack is not None:
        raise ConfigError("install(app) comes before the first request")
    build, describe = app.build_middleware_stack, app.openapi

    # Outside of everything that `add_middleware` adds, and of what answers to exceptions.
    def build_middleware_stack() -> App:
        return _Exchanges(build())

    def openapi() -> dict[str, Any]:
        document = describe()
        add_refusals(document, _limited_operations(app))
        return document

    app.build_middleware_stack = build_middleware_stack  # type: ignore[method-assign]
    app.openapi = openapi  # type: ignore[method-assign]


class _Exchanges:
    """The middleware that begins an exchange for every request."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in KINDS or EXCHANGE in scope:
            await self.app(scope, receive, send)
            return
        exchange = scope[EXCHANGE] = ASGIExchange(send)
        try:
            await self.app(scope, receive, exchange.send)
        except Exception:
            if not exchange.started:
                await exchange.settle(SERVER_ERROR)
            raise
        finally:
            await exchange.end()


def active_limits(dependant: Any) -> list[Limit]:
    """Return the limits in force on a route: those after the last `exempt`, and of defaults the nearest, if any."""
    calls = list(_calls(dependant))
    if exempt in calls:
        last = len(calls) - 1 - calls[::-1].index(exempt)
        calls = calls[last:]
    limits = [call for call in calls if isinstance(call, Limit)]
    own = [one for one in limits if not one.default]
    return own or limits[-1:]


def _calls(dependant: Any) -> Iterator[object]:
    """Yield all dependencies, in the order in which they are solved: the application's before the route's."""
    for inner in dependant.dependencies:
        yield from _calls(inner)
        yield inner.call


def _refused(scope: Scope, exchange: ASGIExchange, answer: Answer) -> Exception:
    if scope["type"] == "websocket" and not can_deny(scope):
        return WebSocketException(POLICY_VIOLATION, "Too many requests")
    _register(scope)
    return RequestRefused(answer, all_fields(exchange.asked) if isinstance(exchange, Unsent) else [])


def _register(scope: Scope) -> None:
    """Let refusals look as they should, unless the application has a handler that they would come to.

    It is done in the application's own dictionary of handlers, when the first refusal is on its way there, so that a
    limit needs no registration anywhere; a mounted application has a dictionary of its own.
    """
    handlers, _ = scope.get("starlette.exception_handlers", ({}, {}))
    if RequestRefused not in handlers:
        nearest = next((handlers[kind] for kind in RequestRefused.__mro__ if kind in handlers), None)
        if nearest is http_exception_handler:
            handlers[RequestRefused] = _respond


async def _respond(connection: HTTPConnection, error: RequestRefused) -> Response | None:
    response = Response(error.answer.body, error.answer.status)
    response.raw_headers = [*error.answer.fields, *error.fields]
    if not isinstance(connection, WebSocket):
        return response
    await connection.send_denial_response(response)  # not every Starlette does that with what is returned
    return None


def _seen(part: Any, name: str = "") -> Any:
    """Return a part of the question as seen by a limit whose functions take a request, or are dependencies."""
    if isinstance(part, Depends):
        return lambda seen: getattr(seen, name)
    if isinstance(part, Mapping):
        return {scope: _seen(function) for scope, function in part.items()}
    if not callable(part):
        return part
    if takes_scope(part):
        return lambda seen: part(seen.connection.scope)
    if is_async(part):

        async def awaited(seen: SimpleNamespace) -> Any:
            return await part(seen.connection)

        return awaited
    return lambda seen: part(seen.connection)


def _signature(injected: Mapping[str, Depends]) -> inspect.Signature:
    """Return what FastAPI is to provide; real types, because it looks for their names in the wrong place."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [
            inspect.Parameter("connection", kind, annotation=HTTPConnection),
            inspect.Parameter("response", kind, annotation=Response),
            *(inspect.Parameter(name, kind, default=part) for name, part in injected.items()),
        ]
    )


def _limited_operations(app: FastAPI) -> Iterator[tuple[str, str, list[RequestLimit[AsyncLimiter]]]]:
    """Yield path, method and limits of every operation that has some."""
    # Where routers are included by reference, this is how to get at the routes as they are in the application.
    contexts = getattr(fastapi.routing, "iter_route_contexts", iter)
    for route in contexts(app.routes):
        dependant = getattr(route, "dependant", None)
        limits = [] if dependant is None else [one.request_limit for one in active_limits(dependant)]
        if limits:
            for method in getattr(route, "methods", None) or ():
                yield str(getattr(route, "path_format", "")), method.lower(), limits
