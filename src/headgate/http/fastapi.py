"""Limits as FastAPI dependencies.

    app = FastAPI(dependencies=[Depends(limit("100/minute", default=True))])
    install(app)

    @app.post("/login", dependencies=[Depends(limit("5/minute", count={401}))])
    async def login(): ...

    @app.get("/health", dependencies=[Depends(exempt)])
    async def health(): ...

A limit counts all requests to the routes that have it: to share one between routes, use the same object. The endpoint needs
no `request` argument; one that wants to know has the decision as the value of the dependency, or as that of
`Depends(decision)`.

`install(app)` puts the fields on every response: errors, exceptions, streams and responses that the endpoint made itself. It
also shows refusals in the OpenAPI document, lets outcomes be counted (`count=`), answers refusals that are raised, as by
`guard`, on every route, and spares exempt routes the dependencies of limits that do not apply to them. Without it, a
dependency sees nothing of the response but what FastAPI makes of the return value, and a refusal that is raised is answered
on routes with a limit; refusals have all fields in any case.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Annotated, Any, NoReturn

from headgate import AsyncLimiter
from headgate._checks import check_kind
from headgate._extras import needing
from headgate._limiting import HeaderStyle
from headgate.clock import Clock
from headgate.decision import Decision
from headgate.errors import ConfigError, CostTooHigh, RateLimited
from headgate.http.asgi import KINDS, RefusalResponse, answer_refusal
from headgate.http.declared import DeclaredLimit, in_force
from headgate.http.exchange import (
    EXCHANGE,
    POLICY_VIOLATION,
    SERVER_ERROR,
    App,
    ASGIExchange,
    Receive,
    Scope,
    Send,
    can_deny,
    nowhere,
)
from headgate.http.headers import Headers, all_fields, encoded
from headgate.http.keys import by_address, matched_route, takes_scope
from headgate.http.limit import Cost, Keys, Outcomes, RequestLimit, RequestOptions, RequestQuota, Tier
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

__all__ = ["Limit", "RequestRefused", "decision", "exempt", "install", "limit"]


_FORGOTTEN = (
    "write dependencies=[Depends(limit(…))], or decision=Depends(limit(…)) among an endpoint's arguments"
)


class RequestRefused(HTTPException):
    """A request that was not admitted.

    To answer in your own way, handle it with `app.exception_handler`, or the status 429, or every HTTPException.

    Attributes:
        answer: The response that it gets otherwise.
    """

    def __init__(self, answer: Answer, fields: dict[str, str]) -> None:
        super().__init__(answer.status, headers=fields or None)
        answer.fields.extend(encoded(fields))
        self.answer = answer


class _NotCalled:
    """Says what to write where FastAPI was given `limit` itself, and wants to know what a request brings as its rules."""

    def __get_pydantic_core_schema__(self, *given: object) -> NoReturn:
        raise ConfigError(f"limit is no dependency before it is called; {_FORGOTTEN}")


def limit(
    *rules: Annotated[str | Rule | AsyncLimiter, _NotCalled()],
    key: Keys | Depends | None = None,
    cost: Cost | Depends = 1,
    tier: Tier | Depends = None,
    quota: RequestQuota | Depends = None,
    quota_for: float = 60.0,
    count: Outcomes | None = None,
    default: bool = False,
    exempt: Callable[[HTTPConnection], bool] | None = None,
    address: Callable[[Any], str] | None = None,
    headers: Headers | HeaderStyle | None = None,
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
        quota: By which quota, if not by that of the tier: text, or a function of the request that returns it, or `None`.
        quota_for: Seconds for which its answer about a key is kept; 0 asks it for every request.
        count: Which statuses count, as `{401, 403}`, `range(200, 300)` or a function of the status. The units are held
            while the request is answered, and given back if the answer has another status. Needs `install`.
        default: Whether a route with a limit of its own, or a nearer default, does without this one.
        exempt: Which requests are let through unasked, as a function of the request.
        address: How the client's address is found; see `by_address`. Used by default, and where `key` returns `None`.
        headers: Which header fields to write: `"both"`, `"ietf"`, `"x-ratelimit"`, `"none"`, or `Headers` for what these do
            not say; by default what the limiter's policy says, or else `"both"`.
        name: The limiter's name; on a given store by default that of its one route, as `POST /login`.
        store: Where it counts; by default in memory of its own.
        clock: Where time comes from.

    A function of the request may be a coroutine function. It can also be a dependency of its own, with `Depends(...)`
    around it, and then take anything that FastAPI provides.
    """
    injected = {"key": key, "cost": cost, "tier": tier, "quota": quota}
    rest = RequestOptions(quota_for=quota_for, count=count, exempt=exempt, address=address, headers=headers)
    return Limit(rules, default, name, store, clock, injected, rest)


async def exempt() -> None:
    """Free a route from the limits of its application and routers: `dependencies=[Depends(exempt)]`."""


async def decision(connection: HTTPConnection) -> Decision | None:
    """Return what the limit that was asked last has decided; `None` if none was asked. A dependency for endpoints."""
    exchange: ASGIExchange | None = connection.scope.get(EXCHANGE)
    return None if exchange is None else exchange.decision


class Limit(DeclaredLimit):
    """A dependency that asks a limiter; made by `limit`. Its value is the decision, or `None` where it does not apply."""

    def __init__(
        self,
        rules: tuple[object, ...],
        default: bool,
        name: str | None,
        store: AsyncStore | str | None,
        clock: Clock | None,
        parts: Mapping[str, Any],
        options: RequestOptions,
    ) -> None:
        injected = {name: part for name, part in parts.items() if isinstance(part, Depends)}
        key, exempt, address = parts["key"], options["exempt"], options["address"] or by_address()
        keys = key.values() if isinstance(key, Mapping) else (key,)
        functions = [part for part in (*keys, *list(parts.values())[1:], address) if callable(part)]
        # Mostly there is only the address to look at, which needs no more than the scope.
        self._takes_scope = exempt is None and not injected and all(map(takes_scope, functions))
        self._injected = f"headgate.{id(self)}"
        values = {name: self._value_of(name) for name in injected}
        given: Any = {**options, **parts, **values, "address": address}
        super().__init__(rules, default, name, store, clock, given)
        self._request_limit = None if self.lacks_name else self.limit_for(AsyncLimiter)
        self._last_route: object = None
        self._applies: dict[int, tuple[object, bool]] = {}
        self.__signature__ = _signature(injected)
        # FastAPI looks here whether to await it; a call comes to the method, which can thus say at once what is wrong.
        self.__call__ = self.ask  # type: ignore[method-assign]

    @property
    def limiter(self) -> AsyncLimiter:
        """The limiter that decides."""
        limiter: AsyncLimiter = self.limit_for(AsyncLimiter).limiter
        return limiter

    @property
    def dependency(self) -> None:
        """What FastAPI asks of things that stand where `Depends(...)` should."""
        raise ConfigError(_FORGOTTEN)

    def __deepcopy__(self, memo: object) -> None:
        raise ConfigError(_FORGOTTEN)  # it stands where the default of an argument does

    def __call__(self, *decorated: Any, **provided: Any) -> Coroutine[Any, Any, Decision | None]:
        if decorated:
            raise ConfigError(f"a limit is no decorator; {_FORGOTTEN}")
        return self.ask(**provided)

    async def ask(self, connection: HTTPConnection, response: Response, **injected: Any) -> Decision | None:
        """Ask about a request, as FastAPI does for every route that depends on it."""
        scope = connection.scope
        if (scope.get("route") is not self._last_route or "fastapi" in scope) and not self.applies(scope):
            return None
        request_limit = self._request_limit or self.request_limit(scope["app"])
        if injected:
            scope[self._injected] = injected
        request = scope if self._takes_scope else connection
        if request_limit.exempt is not None and request_limit.exempt(request):
            return None
        exchange: ASGIExchange = scope.get(EXCHANGE) or self._unsent(scope, request_limit)
        answer = await exchange.ask(request_limit, scope, request)
        if answer is not None:
            raise _refused(scope, exchange, answer)
        if not exchange.sees_response:
            _show(exchange, response)
        return exchange.decision

    def _value_of(self, name: str) -> Callable[[HTTPConnection], Any]:
        """Return the function of a request that finds what FastAPI has injected for a part of the question."""
        return lambda connection: connection.scope[self._injected][name]

    def request_limit(self, app: FastAPI) -> RequestLimit[AsyncLimiter]:
        """Return what asks the limiter, named after its route in this application if it has no name yet."""
        if self.lacks_name:
            routes = [
                f"{','.join(sorted(getattr(route, 'methods', None) or ('WS',)))} {getattr(route, 'path_format', '')}"
                for route, dependant in _routes_of(app)
                if self in _calls(dependant)
            ]
            if len(routes) != 1:
                raise ConfigError(f"a limit of {len(routes)} routes, on a given store, needs a name=")
            self.named(routes[0], AsyncLimiter)
        self._request_limit = self.limit_for(AsyncLimiter)
        return self._request_limit

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

    def _unsent(self, scope: Scope, request_limit: RequestLimit[AsyncLimiter]) -> ASGIExchange:
        """Return an exchange for an application without `install`, which does not see the response."""
        if request_limit.counts is not None:
            raise ConfigError("count= needs the status of the response: call install(app) once")
        if request_limit.version.limiter.units.has_places:
            raise ConfigError(
                "a concurrent rule holds until the response is sent, which only install(app) can see: call it once"
            )
        _register(_handlers(scope), answer_refusal, RateLimited, CostTooHigh)
        exchange = scope[EXCHANGE] = ASGIExchange(nowhere)
        return exchange


def _show(exchange: ASGIExchange, response: Response) -> None:
    """Put the fields where FastAPI takes them from, for a response made of a return value."""
    fields = encoded(all_fields(exchange.asked))
    if len(exchange.asked) > 1:  # those of the limits before are among them
        names = {name for name, _ in fields}
        response.raw_headers[:] = [field for field in response.raw_headers if field[0] not in names]
    response.raw_headers += fields


def install(app: FastAPI) -> None:
    """Let every response of an application carry the fields, and show refusals in its OpenAPI document.

    Call it once, before the application serves; what is mounted in it is covered. To call it on a mounted FastAPI
    application as well completes that one's OpenAPI document.
    """
    check_kind("install", app, FastAPI, "for an application of FastAPI")
    if app.middleware_stack is not None:
        raise ConfigError("install(app) comes before the first request")
    build, describe = app.build_middleware_stack, app.openapi

    # Outside of everything that `add_middleware` adds, and of what answers to exceptions.
    def build_middleware_stack() -> App:
        _register(app.exception_handlers, answer_refusal, RateLimited, CostTooHigh)
        for _, dependant in _routes_of(app):
            _spare(dependant)
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
        except Exception:  # whatever it is, units that are held are settled as for a 500
            if not exchange.started:
                await exchange.settle(SERVER_ERROR)
            raise
        finally:
            if exchange.places:
                await exchange.end()


def active_limits(dependant: Any) -> list[Limit]:
    """Return the limits in force on a route: those after the last `exempt`, and of defaults the nearest, if any."""
    return in_force(
        call if isinstance(call, Limit) else None
        for call in _calls(dependant)
        if call is exempt or isinstance(call, Limit)
    )


def _calls(dependant: Any) -> Iterator[object]:
    """Yield all dependencies, in the order in which they are solved: the application's before the route's."""
    for inner in dependant.dependencies:
        yield from _calls(inner)
        yield inner.call


def _refused(scope: Scope, exchange: ASGIExchange, answer: Answer) -> Exception:
    if scope["type"] == "websocket" and not can_deny(scope):
        return WebSocketException(POLICY_VIOLATION, "Too many requests")
    _register(_handlers(scope), _respond, RequestRefused)
    return RequestRefused(answer, {} if exchange.sees_response else all_fields(exchange.asked))


def _handlers(scope: Scope) -> Any:
    """Return the application's own dictionary of handlers; a mounted application has another.

    What is put there before the first refusal is on its way needs no registration by the user.
    """
    return scope.get("starlette.exception_handlers", ({}, {}))[0]


def _register(handlers: dict[Any, Any], handler: Callable[..., Any], *kinds: type[Exception]) -> None:
    """Let refusals look as they should, unless the application has a handler of its own that they would come to."""
    for kind in kinds:
        if kind in handlers:  # as it is from the second refusal on
            continue
        # One of all exceptions is for what no one expects.
        nearest = [handlers[base] for base in kind.__mro__ if base in handlers and base is not Exception][:1]
        if nearest in ([], [http_exception_handler]):
            handlers[kind] = handler


async def _respond(connection: HTTPConnection, error: RequestRefused) -> RefusalResponse | None:
    if not isinstance(connection, WebSocket):
        return RefusalResponse(error.answer)
    response = Response(error.answer.body, error.answer.status)
    response.raw_headers = error.answer.fields
    await connection.send_denial_response(response)  # not every Starlette does that with what is returned
    return None


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


def _routes_of(app: FastAPI) -> Iterator[tuple[Any, Any]]:
    """Yield each route that has dependencies, as it is in the application, and those."""
    # Where routers are included by reference, this is how to get at their routes.
    contexts = getattr(fastapi.routing, "iter_route_contexts", iter)
    for route in contexts(app.routes):
        dependant = getattr(route, "dependant", None)
        if dependant is not None:
            yield route, dependant


def _spare(dependant: Any) -> None:
    """Take limits out of a route that are not in force on it, with what they depend on."""
    active = active_limits(dependant)
    dependant.dependencies[:] = [
        inner
        for inner in dependant.dependencies
        if inner.name is not None or not isinstance(inner.call, Limit) or inner.call in active
    ]


def _limited_operations(app: FastAPI) -> Iterator[tuple[str, str, list[RequestLimit[AsyncLimiter]]]]:
    """Yield path, method and limits of every operation that has some."""
    for route, dependant in _routes_of(app):
        limits = [one.request_limit(app) for one in active_limits(dependant)]
        if limits:
            for method in getattr(route, "methods", None) or ():
                yield str(getattr(route, "path_format", "")), method.lower(), limits
