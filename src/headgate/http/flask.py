"""Limits for Flask.

    install(app, limit("100/minute", default=True))

    @app.post("/login")
    @limit("5/minute", count={401})
    def login(): ...

    @app.get("/health")
    @exempt
    def health(): ...

    limit("50/minute")(blueprint)

All views decorated with the same object share one count. Limits of the application and of blueprints are checked before the
request is handled. The limit of a view is checked when the view is called, after `before_request` functions such as
authentication.

The functions of a limit take `flask.request`, and can use `g`, `session` and the rest of the request context.
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
from headgate.decision import Decision
from headgate.errors import ConfigError, CostTooHigh, RateLimited
from headgate.http.limit import LimitDefaults, ViewOptions, on_scope
from headgate.http.problems import Answer
from headgate.http.view_limits import MARK, DeclaredLimit, check_order, limits_around, watch
from headgate.http.view_limits import exempt as exempt
from headgate.http.wsgi import EXCHANGE, Environ, StartResponse, WSGIExchange, WSGIScope, accepted_by, respond

with needing("headgate.http.flask", "flask"):
    from flask import Blueprint, Flask, Request, Response, current_app, g, request, request_started
    from werkzeug.exceptions import HTTPException, default_exceptions

__all__ = ["ViewLimit", "decision", "exempt", "install", "limit"]

View = TypeVar("View", bound="Callable[..., Any] | Blueprint")


def limit(
    *rules: str | Rule | Limiter,
    default: bool = False,
    **options: Unpack[ViewOptions],
) -> ViewLimit:
    """Return a decorator that limits views and blueprints.

    Args:
        rules: Rules, or text like `"5/minute; 50/hour"`, decided together; or one limiter, possibly from a policy file.
        default: Whether this limit is replaced by a limit on the view itself or by a nearer default.
        options: The options of `headgate.http.asgi.RateLimitMiddleware`, with functions of the request: `key`, `cost`,
            `tier`, `quota`, `quota_for`, `count`, `exempt`, `address`, `headers`, `name`, `store`, `clock`,
            `on_store_error`, `deadline`, `hooks`. On a shared store, `name` is by default that of the view or blueprint.
    """
    seen = on_scope(options, scope_of)
    made = ViewLimit(rules, default, seen)
    if not made.lacks_name:
        made.limit_for(Limiter)  # reports configuration errors immediately
    return made


def decision() -> Decision | None:
    """Return the decision of the most recent limit checked for the current request; `None` if no limit was checked."""
    exchange: WSGIExchange | None = request.environ.get(EXCHANGE)
    return None if exchange is None else exchange.decision


class ViewLimit(DeclaredLimit):
    """A decorator that checks a limiter; created by `limit`."""

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
            self.decide()
            function = current_app.ensure_sync(view) if is_async else view
            return function(*args, **kwargs)

        self.mark(limited, view)
        request_started.connect(_check_order)
        return limited  # type: ignore[return-value]  # same signature as the view

    def decide(self) -> None:
        """Check the current request; raise an HTTPException if it is refused."""
        current: Request = request._get_current_object()  # type: ignore[attr-defined]
        self.use_defaults(current_app.extensions.get("headgate", {}))
        limit = self.limit_for(Limiter)
        if limit.exempt is not None and limit.exempt(current):
            return
        answer = _exchange(current.environ).decide(limit, current.environ, current)
        if answer is not None:
            raise _error(answer)


def install(app: Flask, *limits: str | Rule | Limiter | ViewLimit, **defaults: Unpack[LimitDefaults]) -> None:
    """Add the fields to every response of an application, answer refusals, and apply limits to all its requests.

    Call it once, after registering the `before_request` functions that must run first. A `RateLimited` raised in a view,
    for example by `guard`, is answered with 429. To send a custom response, use `app.errorhandler(429)`.

    Args:
        app: The application.
        limits: Limits of the whole application, or rules for one.
        defaults: `store`, `on_store_error`, `deadline` and `hooks` of all limits that do not have their own.
    """
    check_kind("app", app, Flask, "an application, as in install(app, '5/minute')")
    own = [found if isinstance(found, ViewLimit) else limit(found) for found in limits]
    for found in own:
        found.use_defaults(defaults)
        found.named(app.name, Limiter)
    if "headgate" in app.extensions:
        raise ConfigError(f"install was already called for {app!r}: call it once, with all limits")
    app.extensions["headgate"] = defaults
    watch(app, lambda app: app.view_functions.values())
    inner = app.wsgi_app

    def wsgi_app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if EXCHANGE in environ:  # created by an outer middleware
            return inner(environ, start_response)
        return respond(environ, start_response, lambda start: inner(environ, start))

    app.wsgi_app = wsgi_app  # type: ignore[method-assign]

    def decide() -> None:
        for found in _plan(app, own):
            found.decide()

    app.before_request(decide)
    for kind in (RateLimited, CostTooHigh):
        app.register_error_handler(kind, _answer_raised)


def _plan(app: Flask, limits: list[ViewLimit]) -> list[ViewLimit]:
    """Return the limits to check before a request is handled: the limits in force except the view's own."""
    view: Any = app.view_functions.get(request.endpoint or "")
    groups = [app.blueprints[name] for name in reversed(request.blueprints)]
    outer = [*limits, *(mark for group in groups for mark in getattr(group, MARK, ()))]
    return limits_around(outer, view, request.method)


_checked: weakref.WeakSet[Flask] = weakref.WeakSet()


def _check_order(app: Flask, **signal: Any) -> None:
    """Check the views of an application at its first request, when all are registered; also without `install`."""
    if app not in _checked:
        if check_order(app.view_functions.values()):
            request_started.disconnect(_check_order)  # connected again by the next limit
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
        # A test handles a request without the application around it.
        exchange = environ[EXCHANGE] = WSGIExchange(lambda *start: lambda body: None)
    return exchange


def _error(answer: Answer) -> HTTPException:
    return default_exceptions[answer.status](response=Response(answer.body, answer.status, answer.headers))


def _answer_raised(error: Any) -> Any:
    answer = _exchange(request.environ).raised(error, accepted_by(request.environ))
    return current_app.handle_http_exception(_error(answer))  # a custom handler may answer
