"""Limits as FastAPI dependencies.

    app = FastAPI(dependencies=[Depends(limit("100/minute", default=True))])
    install(app)

    @app.post("/login", dependencies=[Depends(limit("5/minute", count={401}))])
    async def login(): ...

    @app.get("/health", dependencies=[Depends(exempt)])
    async def health(): ...

All routes that depend on the same object share one count. The endpoint needs no `request` argument. To read the decision,
use the value of the dependency or of `Depends(decision)`.

`install(app)` adds the fields to every response, including errors, exceptions, streams and responses created by the
endpoint. It also documents refusals in the OpenAPI document, enables counting by outcome (`count=`), answers refusals raised
on any route (for example by `guard`), and removes limits from the dependencies of routes that are exempt from them. Without
`install`, only responses that FastAPI builds from a return value get the fields, and raised refusals are answered only on
routes with a limit. Refusals carry all fields in any case.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Annotated, Any, NoReturn, Unpack

from headgate import AsyncLimiter
from headgate._checks import check_kind
from headgate._extras import needing
from headgate._limiting import HeaderStyle
from headgate.clock import Clock
from headgate.decision import Decision
from headgate.errors import ConfigError, CostTooHigh, RateLimited
from headgate.hooks import Hook
from headgate.http.asgi import KINDS, RefusalResponse, answer_refusal
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
from headgate.http.keys import matched_route
from headgate.http.limit import (
    Cost,
    Keys,
    LimitDefaults,
    Outcomes,
    RequestLimit,
    RequestQuota,
    Tier,
    ViewOptions,
)
from headgate.http.openapi import add_refusals
from headgate.http.problems import Answer
from headgate.http.view_limits import DeclaredLimit, in_force
from headgate.outage.policies import OnStoreError
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
    """A refused request.

    To send a custom response, register an `app.exception_handler` for it, for the status 429, or for HTTPException.

    Attributes:
        answer: The default response.
    """

    def __init__(self, answer: Answer, fields: dict[str, str]) -> None:
        super().__init__(answer.status, headers=fields or None)
        answer.fields.extend(encoded(fields))
        self.answer = answer


class _NotCalled:
    """Raise an error with a hint if `limit` itself, without a call, was passed as a dependency."""

    def __get_pydantic_core_schema__(self, *given: object) -> NoReturn:
        raise ConfigError(f"limit was passed without being called; {_FORGOTTEN}")


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
    on_store_error: OnStoreError | None = None,
    deadline: float | None = None,
    hooks: Iterable[Hook] = (),
) -> Limit:
    """Return a dependency that limits its routes.

    Args:
        rules: Rules, or text like `"5/minute; 50/hour"`, decided together; or one limiter, possibly from a policy file.
        key: The key to count by: a function of the request, or one function per scope of the rules. Default: the client's
            address.
        cost: The number of units, or a function of the request that returns it.
        tier: The name of the tier, or a function of the request that returns it.
        quota: A quota that replaces the tier's: text, or a function of the request that returns text or `None`.
        quota_for: Seconds to cache the result of the `quota` function per key; 0 calls it for every request.
        count: The statuses that count, like `{401, 403}`, `range(200, 300)` or a function of the status. The units are held
            while the request is handled, and returned if the response has another status. Needs `install`.
        default: Whether this limit is replaced by a limit on the route itself or by a nearer default.
        exempt: A function of the request that returns whether it is not limited.
        address: The function that finds the client's address, see `by_address`. Used by default, and if `key` returns
            `None`.
        headers: The header fields to write: `"both"`, `"ietf"`, `"x-ratelimit"`, `"none"`, or a `Headers` object. Default:
            the setting of the limiter's policy, or else `"both"`.
        name: The limiter's name; on a shared store the default is the name of its only route, like `POST /login`.
        store: The store that counts; by default a separate memory store.
        clock: The clock to use.
        on_store_error: The answer when the store is down; `"open"`, which admits, by default for network stores.
        deadline: Seconds before a call to a network store is abandoned.
        hooks: Hooks called on every decision.

    A function of the request may be a coroutine function. It can also be wrapped in `Depends(...)`, and then take any
    arguments that FastAPI provides.
    """
    injected = {"key": key, "cost": cost, "tier": tier, "quota": quota}
    rest = ViewOptions(
        quota_for=quota_for,
        count=count,
        exempt=exempt,
        address=address,
        headers=headers,
        on_store_error=on_store_error,
        deadline=deadline,
        hooks=hooks,
        name=name,
        store=store,
        clock=clock,
    )
    return Limit(rules, default, injected, rest)


async def exempt() -> None:
    """Exempt a route from the limits of its application and routers: `dependencies=[Depends(exempt)]`."""


async def decision(connection: HTTPConnection) -> Decision | None:
    """Return the decision of the most recent limit; `None` if no limit was checked. A dependency for endpoints."""
    exchange: ASGIExchange | None = connection.scope.get(EXCHANGE)
    return None if exchange is None else exchange.decision


class Limit(DeclaredLimit):
    """A dependency that checks a limiter; created by `limit`. Its value is the decision, or `None` if it does not apply."""

    def __init__(
        self,
        rules: tuple[object, ...],
        default: bool,
        parts: Mapping[str, Any],
        options: ViewOptions,
    ) -> None:
        injected = {name: part for name, part in parts.items() if isinstance(part, Depends)}
        self._injected = f"headgate.{id(self)}"
        values = {name: self._value_of(name) for name in injected}
        super().__init__(rules, default, {**options, **parts, **values})  # type: ignore[typeddict-item]
        self._request_limit = None if self.lacks_name else self.limit_for(AsyncLimiter)
        self._applies: dict[int, tuple[object, bool]] = {}
        self.__signature__ = _signature(injected)
        # FastAPI inspects this attribute and awaits the result. A direct call uses the class's method, which reports misuse.
        self.__call__ = self.decide  # type: ignore[method-assign]

    def use_defaults(self, defaults: LimitDefaults) -> None:
        super().use_defaults(defaults)
        self._request_limit = None if self.lacks_name else self.limit_for(AsyncLimiter)

    @property
    def limiter(self) -> AsyncLimiter:
        """The limiter that decides."""
        limiter: AsyncLimiter = self.limit_for(AsyncLimiter).limiter
        return limiter

    @property
    def dependency(self) -> None:
        """Raise an error with a hint; FastAPI reads this attribute of an object in the place of `Depends(...)`."""
        raise ConfigError(_FORGOTTEN)

    def __deepcopy__(self, memo: object) -> None:
        raise ConfigError(_FORGOTTEN)  # used as the default of an argument

    def __call__(self, *decorated: Any, **provided: Any) -> Coroutine[Any, Any, Decision | None]:
        if decorated:
            raise ConfigError(f"a limit cannot be used as a decorator; {_FORGOTTEN}")
        return self.decide(**provided)

    async def decide(
        self, connection: HTTPConnection, response: Response, **injected: Any
    ) -> Decision | None:
        """Check a request; FastAPI calls it for every route that depends on this limit."""
        scope = connection.scope
        if not self.applies(scope):
            return None
        request_limit = self._request_limit or self.request_limit(scope["app"])
        if injected:
            scope[self._injected] = injected
        if request_limit.exempt is not None and request_limit.exempt(connection):
            return None
        exchange: ASGIExchange = scope.get(EXCHANGE) or self._unsent(scope, request_limit)
        answer = await exchange.decide(request_limit, scope, connection)
        if answer is not None:
            raise _refused(scope, exchange, answer)
        if not exchange.sees_response:
            _show(exchange, response)
        return exchange.decision

    def _value_of(self, name: str) -> Callable[[HTTPConnection], Any]:
        """Return a function of a request that returns the injected value of an argument of `limit`, like `key`."""
        return lambda connection: connection.scope[self._injected][name]

    def request_limit(self, app: FastAPI) -> RequestLimit[AsyncLimiter]:
        """Return the limit; on first use in an application, name its limiter after the route if it needs a name."""
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
        """Return whether this limit is in force on the route of a request."""
        route = matched_route(scope)
        known = self._applies.get(id(route))
        if known is None or known[0] is not route:
            dependant = getattr(route, "dependant", None)
            known = route, dependant is None or self in active_limits(dependant)
            self._applies[id(route)] = known
        return known[1]

    def _unsent(self, scope: Scope, request_limit: RequestLimit[AsyncLimiter]) -> ASGIExchange:
        """Return an exchange for an application without `install`, where the response is not visible."""
        if request_limit.counts is not None:
            raise ConfigError("count= needs the status of the response: call install(app) once")
        if request_limit.version.limiter.units.has_places:
            raise ConfigError(
                "a concurrent rule holds until the response is sent, and needs install(app) for that: call it once"
            )
        _register(_handlers(scope), answer_refusal, RateLimited, CostTooHigh)
        exchange = scope[EXCHANGE] = ASGIExchange(nowhere)
        return exchange


def _show(exchange: ASGIExchange, response: Response) -> None:
    """Add the fields to the response object that FastAPI merges into the response for a return value."""
    fields = encoded(all_fields(exchange.asked))
    if len(exchange.asked) > 1:  # the fields of earlier limits are included
        names = {name for name, _ in fields}
        response.raw_headers[:] = [field for field in response.raw_headers if field[0] not in names]
    response.raw_headers += fields


def install(app: FastAPI, **defaults: Unpack[LimitDefaults]) -> None:
    """Add the fields to every response of an application, and document refusals in its OpenAPI document.

    Call it once, before the first request; mounted applications are covered. Call it also on a mounted FastAPI
    application to complete that application's OpenAPI document. `store=`, `on_store_error=`, `deadline=` and `hooks=` are
    defaults of all limits of its routes that do not have their own.
    """
    check_kind("install", app, FastAPI, "for an application of FastAPI")
    if app.middleware_stack is not None:
        raise ConfigError("call install(app) before the first request")
    build, describe = app.build_middleware_stack, app.openapi

    # Wrap everything, including middlewares added later and Starlette's exception handling.
    def build_middleware_stack() -> App:
        _register(app.exception_handlers, answer_refusal, RateLimited, CostTooHigh)
        for _, dependant in _routes_of(app):
            for call in _calls(dependant):
                if isinstance(call, Limit):
                    call.use_defaults(defaults)
            _spare(dependant)
        return _Exchanges(build())

    def openapi() -> dict[str, Any]:
        document = describe()
        add_refusals(document, _limited_operations(app))
        return document

    app.build_middleware_stack = build_middleware_stack  # type: ignore[method-assign]
    app.openapi = openapi  # type: ignore[method-assign]


class _Exchanges:
    """The middleware that creates an exchange for every request."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in KINDS or EXCHANGE in scope:
            await self.app(scope, receive, send)
            return
        exchange = scope[EXCHANGE] = ASGIExchange(send)
        try:
            await self.app(scope, receive, exchange.send)
        except Exception:  # units on hold are settled as for a 500
            if not exchange.started:
                await exchange.settle(SERVER_ERROR)
            raise
        finally:
            if exchange.places:
                await exchange.end()


def active_limits(dependant: Any) -> list[Limit]:
    """Return the limits in force on a route, see `in_force`."""
    return in_force(
        call if isinstance(call, Limit) else None
        for call in _calls(dependant)
        if call is exempt or isinstance(call, Limit)
    )


def _calls(dependant: Any) -> Iterator[object]:
    """Yield all dependencies in the order in which they are resolved: the application's before the route's."""
    for inner in dependant.dependencies:
        yield from _calls(inner)
        yield inner.call


def _refused(scope: Scope, exchange: ASGIExchange, answer: Answer) -> Exception:
    if scope["type"] == "websocket" and not can_deny(scope):
        return WebSocketException(POLICY_VIOLATION, "Too many requests")
    _register(_handlers(scope), _respond, RequestRefused)
    return RequestRefused(answer, {} if exchange.sees_response else all_fields(exchange.asked))


def _handlers(scope: Scope) -> Any:
    """Return the exception handlers of the innermost application; a mounted application has its own.

    Handlers can be added until the first refusal is raised, so users need not register them.
    """
    return scope.get("starlette.exception_handlers", ({}, {}))[0]


def _register(handlers: dict[Any, Any], handler: Callable[..., Any], *kinds: type[Exception]) -> None:
    """Register a handler for refusals, unless the application has a custom handler that would receive them."""
    for kind in kinds:
        if kind in handlers:  # already registered by an earlier refusal
            continue
        # A handler of all exceptions is meant for unexpected errors.
        nearest = [handlers[base] for base in kind.__mro__ if base in handlers and base is not Exception][:1]
        if nearest in ([], [http_exception_handler]):
            handlers[kind] = handler


async def _respond(connection: HTTPConnection, error: RequestRefused) -> RefusalResponse | None:
    if not isinstance(connection, WebSocket):
        return RefusalResponse(error.answer)
    response = Response(error.answer.body, error.answer.status)
    response.raw_headers = error.answer.fields
    await connection.send_denial_response(response)  # not every Starlette version sends a returned response
    return None


def _signature(injected: Mapping[str, Depends]) -> inspect.Signature:
    """Return the signature that FastAPI injects by; with real types, because it resolves names in another module."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [
            inspect.Parameter("connection", kind, annotation=HTTPConnection),
            inspect.Parameter("response", kind, annotation=Response),
            *(inspect.Parameter(name, kind, default=part) for name, part in injected.items()),
        ]
    )


def _routes_of(app: FastAPI) -> Iterator[tuple[Any, Any]]:
    """Yield each route with dependencies as registered in the application, and its dependencies."""
    # Newer FastAPI includes routers by reference; this function yields their routes.
    contexts = getattr(fastapi.routing, "iter_route_contexts", iter)
    for route in contexts(app.routes):
        dependant = getattr(route, "dependant", None)
        if dependant is not None:
            yield route, dependant


def _spare(dependant: Any) -> None:
    """Remove limits that are not in force on a route from its dependencies, with their sub-dependencies."""
    active = active_limits(dependant)
    dependant.dependencies[:] = [
        inner
        for inner in dependant.dependencies
        if inner.name is not None or not isinstance(inner.call, Limit) or inner.call in active
    ]


def _limited_operations(app: FastAPI) -> Iterator[tuple[str, str, list[RequestLimit[AsyncLimiter]]]]:
    """Yield path, method and limits of every operation with limits."""
    for route, dependant in _routes_of(app):
        limits = [one.request_limit(app) for one in active_limits(dependant)]
        if limits:
            for method in getattr(route, "methods", None) or ():
                yield str(getattr(route, "path_format", "")), method.lower(), limits
