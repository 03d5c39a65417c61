"""Limits for any WSGI application: a middleware without dependencies.

    app = RateLimitMiddleware(app, "100/minute")

As `headgate.http.asgi`, for threads. Key, cost, tier and quota see the request as an ASGI scope, with the WSGI environment
under `"wsgi"`, so that the same key functions serve both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from http import HTTPStatus
from typing import Any

from headgate import Limiter
from headgate.errors import ConfigError, CostTooHigh, RateLimited, StoreError
from headgate.hooks import logger
from headgate.http.exchange import NOT_GIVEN_BACK, SERVER_ERROR, Exchange
from headgate.http.headers import Asked, Field, TextField, all_fields, replaced
from headgate.http.limit import LimitMiddleware, RequestLimit
from headgate.http.problems import Answer, too_costly
from headgate.http.steps import run

__all__ = ["RateLimitMiddleware"]

Environ = MutableMapping[str, Any]
StartResponse = Callable[..., Callable[[bytes], object]]
App = Callable[[Environ, StartResponse], Iterable[bytes]]

EXCHANGE = "headgate.exchange"
"""Where an environment has its exchange."""


class RateLimitMiddleware(LimitMiddleware[Limiter, App]):
    """Asks a limiter about every request, and answers those that it refuses.

    The arguments are those of `headgate.http.asgi.RateLimitMiddleware`, with a `Limiter`. Functions see a scope made of the
    environment, which is under `"wsgi"`, and cannot be awaited.
    """

    kind = Limiter

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        scope, limit = WSGIScope(environ), self.limit
        if limit.exempt is not None and limit.exempt(scope):
            return self.app(environ, start_response)
        exchange: WSGIExchange | None = environ.get(EXCHANGE)
        if exchange is None:
            return respond(environ, start_response, lambda start: self._answer(environ, scope, start))
        return self._answer(environ, scope, start_response)

    def _answer(self, environ: Environ, scope: WSGIScope, start_response: StartResponse) -> Iterable[bytes]:
        exchange: WSGIExchange = environ[EXCHANGE]
        answer = exchange.ask(self.limit, environ, scope)
        if answer is None:
            return self.app(environ, start_response)
        return send(environ, start_response, answer)


def respond(
    environ: Environ, start_response: StartResponse, app: Callable[[StartResponse], Iterable[bytes]]
) -> Iterable[bytes]:
    """Begin an exchange, let an application answer in it, and end it when the response is sent."""
    exchange = environ[EXCHANGE] = WSGIExchange(start_response)
    try:
        try:
            body = app(exchange.start)
        except (RateLimited, CostTooHigh) as error:
            if exchange.started:
                raise
            body = send(environ, exchange.start, exchange.raised(error, accepted_by(environ)))
    except BaseException as error:
        if isinstance(error, Exception):
            exchange.settle(SERVER_ERROR)
        exchange.end()
        raise
    return EndingBody(body, exchange) if exchange.places else body


def send(environ: Environ, start_response: StartResponse, answer: Answer) -> list[bytes]:
    """Start a response of ours, and return its body."""
    start_response(f"{answer.status} {HTTPStatus(answer.status).phrase}", answer.headers)
    # A body that a HEAD does not have would be taken for the next response.
    return [] if environ.get("REQUEST_METHOD") == "HEAD" else [answer.body]


class WSGIExchange(Exchange[Limiter]):
    """An exchange whose response is started with a function."""

    __slots__ = ()

    def ask(self, limit: RequestLimit[Limiter], environ: Environ, request: Any) -> Answer | None:
        """Ask a limit about the request, and return the answer to send if it is not admitted. A preflight is not counted.

        Args:
            limit: The limit.
            environ: The request.
            request: What the functions of the limit take.
        """
        if is_preflight(environ):
            return None
        try:
            asked = decide(limit, request, self)
        except CostTooHigh as error:
            return too_costly(error, accepted_by(environ))
        self.asked.append(asked)
        return None if asked[1].allowed else self.refusal(accepted_by(environ))

    def start(self, status: str, headers: list[TextField], *exc_info: Any) -> Callable[[bytes], object]:
        """Start the response, with the fields. An application may do so again, to report an error."""
        self.started = True
        if self.holds:
            self.settle(int(status[:3]))
        write: Callable[[bytes], object] = self._deliver(
            status, replaced(headers, list(all_fields(self.asked).items())), *exc_info
        )
        return write

    def settle(self, status: int) -> None:
        """Make final what was held."""
        _settle_all(self.final_costs(status))

    def end(self) -> None:
        """Free the places of the request, which is over."""
        _settle_all(self.over())


def decide(limit: RequestLimit[Limiter], request: Any, exchange: Exchange[Any] | None) -> Asked:
    """Ask a limit about a request; what is held until its response is kept in the exchange.

    Raises:
        CostTooHigh: The limit never admits so much.
        ConfigError: Something has to be held, and there is no exchange.
    """
    question = limit.question(request)
    version = limit.version  # once: the limiter's policy may change while it decides
    quotas = run(version.own_quotas(question, request)) if version.quotas else None
    if version.holds:
        if exchange is None:
            raise ConfigError(
                "count= and concurrent rules need a middleware, as headgate.http.django.rate_limits"
            )
        quota = version.by_name(quotas)
        hold = version.limiter.hold(question.key, question.cost, tier=question.tier, quota=quota)
        exchange.keep(version, limit, hold)
        decision = hold.decision
    else:
        if quotas is not None or type(question.cost) is not int:
            question = version.complete(question, quotas)
        decision, _ = version.limiter.gate.ask(question)
    return version.asked(question, decision, quotas)


def _settle_all(finals: Iterable[tuple[Any, Any]]) -> None:
    for hold, cost in finals:
        try:
            hold.settle(cost)
        except StoreError:
            logger.warning(NOT_GIVEN_BACK, hold.cost, exc_info=True)


class EndingBody:
    """The body of a response, whose end is that of the request: servers close it, whatever happens."""

    def __init__(self, body: Iterable[bytes], exchange: WSGIExchange) -> None:
        self._body = body
        self._exchange = exchange

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._body)

    def close(self) -> None:
        try:
            close = getattr(self._body, "close", None)
            if close is not None:
                close()
        finally:
            self._exchange.end()


def is_preflight(environ: Environ) -> bool:
    """Return whether this is a CORS preflight; see `headgate.http.exchange.is_preflight`."""
    return (
        environ.get("REQUEST_METHOD") == "OPTIONS"
        and {
            "HTTP_ORIGIN",
            "HTTP_ACCESS_CONTROL_REQUEST_METHOD",
        }
        <= environ.keys()
    )


def accepted_by(environ: Environ) -> bytes:
    """Return the `Accept` field of a request."""
    accept: str = environ.get("HTTP_ACCEPT", "")
    return accept.encode("latin-1")


class WSGIScope(dict[str, Any]):
    """A WSGI environment as an ASGI scope; header fields are collected when they are first read."""

    def __init__(self, environ: Environ) -> None:
        peer = environ.get("REMOTE_ADDR")
        super().__init__(
            type="http",
            method=environ.get("REQUEST_METHOD", ""),
            path=environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", ""),
            query_string=environ.get("QUERY_STRING", "").encode("latin-1"),
            client=(peer, 0) if peer else None,
            wsgi=environ,
        )

    def __missing__(self, name: str) -> list[Field]:
        if name != "headers":
            raise KeyError(name)
        self["headers"] = [
            (key[5:].replace("_", "-").lower().encode("latin-1"), value.encode("latin-1"))
            for key, value in self["wsgi"].items()
            if key.startswith("HTTP_")
        ]
        return self["headers"]  # type: ignore[no-any-return]  # just put there
