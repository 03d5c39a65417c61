"""Limits for Django: for sync and async views, under WSGI and ASGI.

    MIDDLEWARE = [..., "headgate.http.django.rate_limits"]        # after AuthenticationMiddleware
    HEADGATE_LIMITS = [limit("100/minute", default=True)]        # optional: limits of the whole site
    HEADGATE_DEFAULTS = {"store": "redis://localhost"}           # optional: also on_store_error, deadline, hooks

    @limit("5/minute", key=by_user, count={401})
    def login(request): ...

    @exempt
    def health(request): ...

All views decorated with the same object share one count. A limit decorates functions and methods of class-based views, and
works with `method_decorator`. The middleware adds the fields to every response, answers raised refusals (for example from
`guard`), and checks the limits of the site. Without the middleware, a limited view does this for itself.

The functions of a limit take the request. For async views they may be coroutine functions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, Unpack, cast

from headgate import AsyncLimiter, Limiter, Rule
from headgate._checks import check_list
from headgate._extras import needing
from headgate._steps import Steps, run, run_async
from headgate.decision import Decision
from headgate.errors import ConfigError, CostTooHigh, RateLimited
from headgate.http.exchange import EXCHANGE as SCOPE_EXCHANGE
from headgate.http.exchange import SERVER_ERROR, ASGIExchange, nowhere
from headgate.http.headers import put_fields
from headgate.http.limit import RequestLimit, ViewOptions, on_scope
from headgate.http.problems import Answer
from headgate.http.view_limits import DeclaredLimit, in_force, limits_around
from headgate.http.view_limits import exempt as exempt
from headgate.http.wsgi import EXCHANGE, EndingBody, WSGIExchange, WSGIScope, accepted_by
from headgate.keys import Key

with needing("headgate.http.django", "django"):
    from asgiref.sync import iscoroutinefunction, markcoroutinefunction
    from django.conf import settings
    from django.http import HttpRequest, HttpResponse

__all__ = ["DjangoLimit", "by_session", "by_user", "decision", "exempt", "limit", "rate_limits"]

View = TypeVar("View", bound=Callable[..., Any])
AnyExchange = WSGIExchange | ASGIExchange

SITE = "site"
"""The default name of a limit of the whole site on a shared store."""


def limit(
    *rules: str | Rule | Limiter | AsyncLimiter,
    default: bool = False,
    **options: Unpack[ViewOptions],
) -> DjangoLimit:
    """Return a decorator that limits views; also used in `HEADGATE_LIMITS`.

    The arguments are those of `headgate.http.flask.limit`. To pass a limiter instead of rules, use a `Limiter` for sync
    views and an `AsyncLimiter` for async views.
    """
    seen = on_scope(options, scope_of)
    return DjangoLimit(rules, default, seen)


def by_user(request: Any) -> Key | None:
    """Count by the user's primary key; without a user, by address."""
    return _user_key(request.user)


async def _by_awaited_user(request: Any) -> Key | None:
    return _user_key(await request.auser())


def _user_key(user: Any) -> Key | None:
    return str(user.pk) if user is not None and user.is_authenticated else None  # REST framework may set None


by_user.awaited = _by_awaited_user  # type: ignore[attr-defined]  # for async views


def by_session(request: Any) -> Key | None:
    """Count by session; without a saved session, by address."""
    key: Key | None = request.session.session_key
    return key


def decision(request: Any) -> Decision | None:
    """Return the decision of the most recent limit checked for a request; `None` if no limit was checked."""
    exchange: AnyExchange | None = outer_exchange(request)
    return None if exchange is None else exchange.decision


class DjangoLimit(DeclaredLimit):
    """A decorator that checks a limiter; created by `limit`."""

    def use_settings(self) -> None:
        """Use the defaults in the setting `HEADGATE_DEFAULTS`."""
        defaults: Any = getattr(settings, "HEADGATE_DEFAULTS", {})
        self.use_defaults(defaults)

    def _made(self, kind: type) -> RequestLimit[Any]:
        self.use_settings()
        return super()._made(kind)

    def __call__(self, view: View) -> View:
        if not callable(view) or isinstance(view, type):
            raise ConfigError(f"a limit is for views, not {view!r}; see method_decorator")
        if self.default:
            raise ConfigError("default=True is for limits of the site, in HEADGATE_LIMITS")
        if view.__module__ != "django.utils.decorators":  # method_decorator first wraps a dummy
            kind = AsyncLimiter if iscoroutinefunction(view) else Limiter
            self.named(f"{view.__module__}.{view.__qualname__}", kind)
        limited: Any
        if iscoroutinefunction(view):

            async def limited(*args: Any, **kwargs: Any) -> Any:
                return await run_async(handled(ASGIExchange, _request_of(args), self, view, args, kwargs))
        else:

            def limited(*args: Any, **kwargs: Any) -> Any:
                return run(handled(WSGIExchange, _request_of(args), self, view, args, kwargs))

        limited = wraps(view)(limited)
        self.mark(limited, view)
        return cast("View", limited)


def handled(
    kind: type[AnyExchange],
    request: Any,
    limit: DjangoLimit | None,
    respond: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    unrouted: Sequence[DjangoLimit] = (),
) -> Steps:
    """Check a limit and call `respond`; the outermost call for a request adds the fields to the response.

    If the URL matched no view, the limits in `unrouted` are checked, so that probing for URLs is limited too.
    """
    outer = outer_exchange(request)
    is_inner = isinstance(outer, kind)
    exchange: Any = outer if is_inner else kind(nowhere)  # Django returns responses instead of sending them
    if not is_inner:
        request.META[EXCHANGE] = exchange
        if outer is not None:
            exchange.asked = outer.asked
    try:
        answer = None if limit is None else (yield decide(exchange, limit, request))
        response = (yield respond(*args, **kwargs)) if answer is None else _response(answer)
        if unrouted and request.resolver_match is None:
            response = (yield from asked(exchange, unrouted, request)) or response
        if is_inner:
            return response
    except (RateLimited, CostTooHigh) as error:
        if is_inner:
            raise
        response = _response(exchange.raised(error, accepted_by(request.META)))
    except BaseException as error:
        if not is_inner:
            if isinstance(error, Exception):
                yield exchange.settle(SERVER_ERROR)
            yield exchange.end()
        raise
    finally:
        request.META[EXCHANGE] = outer
    if exchange.holds or exchange.places:
        yield from _settled(response, exchange)
    if outer is None and exchange.asked:
        put_fields(response.headers, exchange.asked)
    return response


def _settled(response: Any, exchange: Any) -> Steps:
    """Settle the holds for a response."""
    yield exchange.settle(response.status_code)
    if exchange.places and getattr(response, "streaming", False):
        streamed: Any = _streamed if isinstance(exchange, ASGIExchange) else EndingBody
        response.streaming_content = streamed(response.streaming_content, exchange)
    elif exchange.places:
        yield exchange.end()


def asked(exchange: AnyExchange, limits: Iterable[DjangoLimit], request: Any) -> Steps:
    """Check a request against several limits, and return the response of the first that refuses; `None` if none does."""
    for one in limits:
        answer = yield decide(exchange, one, request)
        if answer is not None:
            return _response(answer)
    return None


def decide(exchange: AnyExchange, one: DjangoLimit, request: Any) -> Any:
    """Check a request against a limit; the result of the returned step is the answer if the limit refuses."""
    is_sync = isinstance(exchange, WSGIExchange)
    limit = one.limit_for(Limiter if is_sync else AsyncLimiter)
    if limit.exempt is not None and limit.exempt(request):
        return None
    return exchange.decide(limit, request.META if is_sync else WSGIScope(request.META), request)


def rate_limits(get_response: Callable[[HttpRequest], Any]) -> SiteLimits:
    """Return the middleware; its name goes into `MIDDLEWARE`."""
    return (AsyncSiteLimits if iscoroutinefunction(get_response) else SiteLimits)(get_response)


rate_limits.sync_capable = rate_limits.async_capable = True  # type: ignore[attr-defined]  # read by Django


class SiteLimits:
    """The middleware for threads."""

    kind: type[AnyExchange] = WSGIExchange

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        self.get_response = get_response
        given = getattr(settings, "HEADGATE_LIMITS", ())
        check_list("HEADGATE_LIMITS", given, object, "['5/minute']")
        self._site = [found if isinstance(found, DjangoLimit) else limit(found) for found in given]
        for found in self._site:
            found.named(SITE, Limiter if self.kind is WSGIExchange else AsyncLimiter)
        self._unrouted = in_force(self._site)

    def __call__(self, request: HttpRequest) -> Any:
        return run(self._handled(request))

    def process_view(self, request: HttpRequest, view: Any, args: Any, kwargs: Any) -> Any:
        """Check the limits of the site, now that the view is known."""
        limits = limits_around(self._site, view, request.method)
        return run(asked(outer_exchange(request), limits, request))

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        """Answer a raised refusal."""
        exchange = outer_exchange(request)
        if exchange is None or not isinstance(error, RateLimited | CostTooHigh):
            return None
        return _response(exchange.raised(error, accepted_by(request.META)))

    def _handled(self, request: HttpRequest) -> Steps:
        return handled(self.kind, request, None, self.get_response, (request,), {}, self._unrouted)


class AsyncSiteLimits(SiteLimits):
    """The middleware for tasks."""

    kind = ASGIExchange

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        super().__init__(get_response)
        markcoroutinefunction(self)

    async def __call__(self, request: HttpRequest) -> Any:
        return await run_async(self._handled(request))

    async def process_view(self, request: HttpRequest, view: Any, args: Any, kwargs: Any) -> Any:
        limits = limits_around(self._site, view, request.method)
        return await run_async(asked(outer_exchange(request), limits, request))


def scope_of(request: Any) -> WSGIScope:
    """Return a request as an ASGI scope, for key functions that take one."""
    scope = WSGIScope(request.META)
    scope["route"], scope["user"] = request.resolver_match, getattr(request, "user", None)
    return scope


def _request_of(args: tuple[Any, ...]) -> Any:
    """Return the request from the arguments of a view, which may be a method."""
    for arg in args[:2]:
        if hasattr(arg, "META"):
            return arg
    raise ConfigError("a limit is for views, whose first argument is the request")


def outer_exchange(request: Any) -> Any:
    """Return the current exchange of a request, created by a middleware or by an outer limit."""
    exchange = request.META.get(EXCHANGE)
    if exchange is None and (scope := vars(request).get("scope")) is not None:
        return scope.get(SCOPE_EXCHANGE)  # from an outer ASGI middleware
    return exchange


def _response(answer: Answer) -> HttpResponse:
    return HttpResponse(answer.body, status=answer.status, headers=dict(answer.headers))


async def _streamed(content: AsyncIterator[bytes], exchange: ASGIExchange) -> AsyncIterator[bytes]:
    try:
        async for part in content:
            yield part
    finally:
        await exchange.end()
