"""Limits for Flask.

    install(app, limit("100/minute", default=True))

    @app.post("/login")
    @limit("5/minute", count={401})
    def login(): ...

    @app.get("/health")
    @exempt
    def health(): ...

    limit("50/minute")(blueprint)

A limit counts all requests to the views that have it: to share one between views, use the same object. Limits of the
application and of blueprints are asked before the request is handled, those of a view when it is called: what runs
`before_request`, as authentication does, has then been done.

Functions of a limit take `flask.request`, and see `g`, `session` and everything else of the request's context.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar, Unpack

from headgate import Limiter, Rule
from headgate._checks import check_kind
from headgate._extras import needing
from headgate.clock import Clock
from headgate.decision import Decision
from headgate.errors import ConfigError, CostTooHigh, RateLimited
from headgate.http.declared import MARK, DeclaredLimit, check_order, limits_around, watch
from headgate.http.declared import exempt as exempt
from headgate.http.limit import RequestOptions, on_scope
from headgate.http.problems import Answer
from headgate.http.wsgi import EXCHANGE, Environ, StartResponse, WSGIExchange, WSGIScope, accepted_by, respond
from headgate.stores import Store

with needing("headgate.http.flask", "flask"):
    from flask import Blueprint, Flask, Request, Response, current_app, g, request, request_started
    from werkzeug.exceptions import HTTPException, default_exceptions

__all__ = ["ViewLimit", "decision", "exempt", "install", "limit"]

View = TypeVar("View", bound="Callable[..., Any] | Blueprint")


def limit(
    *rules: str | Rule | Limiter,
    default: bool = False,
    name: str | None = None,
    store: Store | str | None = None,
    clock: Clock | None = None,
    **options: Unpack[RequestOptions],
) -> ViewLimit:
    """Return a decorator that limits the views and blueprints that have it.

    Args:
        rules: Rules, or text like `"5/minute; 50/hour"`, decided together; or one limiter, perhaps of a policy file.
        default: Whether a view with a limit of its own, or a nearer default, does without this one.
        name: The limiter's name; on a given store by default that of the view or blueprint.
        store: Where it counts; by default in memory of its own.
        clock: Where time comes from.
        options: As of `headgate.http.asgi.RateLimitMiddleware`, with functions of the request: `key`, `cost`, `tier`,
            `quota`, `quota_for`, `count`, `exempt`, `address`, `headers`.
    """
    seen = on_scope(options, scope_of, lambda request: request.environ.get("REMOTE_ADDR"))
    made = ViewLimit(rules, default, name, store, clock, seen)
    if not made.lacks_name:
        made.limit_for(Limiter)  # so that what is wrong with it is said at once
    return made


def decision() -> Decision | None:
    """Return what the limit that was asked last has decided about the present request; `None` if none was asked."""
    exchange: WSGIExchange | None = request.environ.get(EXCHANGE)
    return None if exchange is None else exchange.decision


class ViewLimit(DeclaredLimit):
    """A decorator that asks a limiter; made by `limit`."""

    def __call__(self, view: View) -> View:
        if isinstance(view, Blueprint):
            self.named(view.name, Limiter)
            setattr(view, MARK, (*getattr(view, MARK, ()), self))
            return view
        if not callable(view) or isinstance(view, Flask):
            raise ConfigError(f"a limit is for views and blueprints, not {view!r}; see install")
        if self.default:
            raise ConfigError("default=True is for limits of applications and blueprints, not of a view")
        self.named(f"{view.__module__}.{view.__qualname__}", Limiter)
        is_async = inspect.iscoroutinefunction(view)

        @wraps(view)
        def limited(*args: Any, **kwargs: Any) -> Any:
            self.ask()
            function = current_app.ensure_sync(view) if is_async else view
            return function(*args, **kwargs)

        self.mark(limited, view)
        request_started.connect(_check_order)
        return limited  # type: ignore[return-value]  # it is what was given, but limited

    def ask(self) -> None:
        """Ask about the present request, and raise an HTTPException if it is refused."""
        current: Request = request._get_current_object()  # type: ignore[attr-defined]
        limit = self.limit_for(Limiter)
        if limit.exempt is not None and limit.exempt(current):
            return
        answer = _exchange(current.environ).ask(limit, current.environ, current)
        if answer is not None:
            raise _error(answer)


def install(app: Flask, *limits: str | Rule | Limiter | ViewLimit) -> None:
    """Put the fields on every response of an application, answer refusals, and ask limits about all its requests.

    Call it once, after registering what has to run `before_request`. A `RateLimited` that is raised in a view, as `guard`
    does, is answered with 429. To answer in your own way, use `app.errorhandler(429)`.

    Args:
        app: The application.
        limits: Limits of the whole application, or rules for one.
    """
    check_kind("app", app, Flask, "an application, as in install(app, '5/minute')")
    own = [found if isinstance(found, ViewLimit) else limit(found) for found in limits]
    for found in own:
        found.named(app.name, Limiter)
    if "headgate" in app.extensions:
        raise ConfigError(f"{app!r} has its limits already: call install once, with all of them")
    app.extensions["headgate"] = own
    watch(app, lambda app: app.view_functions.values())
    inner = app.wsgi_app

    def wsgi_app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if EXCHANGE in environ:  # that of a middleware around the application
            return inner(environ, start_response)
        return respond(environ, start_response, lambda start: inner(environ, start))

    app.wsgi_app = wsgi_app  # type: ignore[method-assign]
    plans: dict[tuple[str | None, str], list[ViewLimit]] = {}

    def ask() -> None:
        route = request.endpoint, request.method
        plan = plans.get(route)
        if plan is None:
            plan = _plan(app, own)
            if request.endpoint is not None:  # of which there are only so many
                plans[route] = plan
        for found in plan:
            found.ask()

    app.before_request(ask)
    for kind in (RateLimited, CostTooHigh):
        app.register_error_handler(kind, _answer_raised)


def _plan(app: Flask, limits: list[ViewLimit]) -> list[ViewLimit]:
    """Return the limits to ask before a request is handled: those in force which are not the view's own."""
    view: Any = app.view_functions.get(request.endpoint or "")
    groups = [app.blueprints[name] for name in reversed(request.blueprints)]
    outer = [*limits, *(mark for group in groups for mark in getattr(group, MARK, ()))]
    return limits_around(outer, view, request.method)


_checked: weakref.WeakSet[Flask] = weakref.WeakSet()


def _check_order(app: Flask, **signal: Any) -> None:
    """Check the views of an application at its first request, when all are known; also of one without `install`."""
    if app not in _checked:
        if check_order(app.view_functions.values()):
            request_started.disconnect(_check_order)  # until there is another limit
        _checked.add(app)


def scope_of(request: Request) -> WSGIScope:
    """Return a request as an ASGI scope, for key functions that take one; its user is `g.user`."""
    scope = WSGIScope(request.environ)
    scope["route"], scope["user"] = request.url_rule, g.get("user")
    return scope


def _exchange(environ: Environ) -> WSGIExchange:
    exchange: WSGIExchange | None = environ.get(EXCHANGE)
    if exchange is None:
        if "headgate" not in current_app.extensions:
            raise ConfigError("a view has a limit, but the application has none: call install(app) once")
        # A test that handles a request without the application around it.
        exchange = environ[EXCHANGE] = WSGIExchange(lambda *start: lambda body: None)
    return exchange


def _error(answer: Answer) -> HTTPException:
    return default_exceptions[answer.status](response=Response(answer.body, answer.status, answer.headers))


def _answer_raised(error: Any) -> Any:
    answer = _exchange(request.environ).raised(error, accepted_by(request.environ))
    return current_app.handle_http_exception(_error(answer))  # perhaps the application has its own answer
