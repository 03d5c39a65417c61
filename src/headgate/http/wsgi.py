"""Limits for any WSGI application: a middleware without dependencies.

    app = RateLimitMiddleware(app, "100/minute")

The counterpart of `headgate.http.asgi` for threads. Key, cost, tier and quota functions receive the request as an ASGI
scope, with the WSGI environment under `"wsgi"`, so the same key functions work for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from http import HTTPStatus
from typing import Any

from headgate import Limiter
from headgate._steps import run
from headgate.errors import ConfigError, CostTooHigh, RateLimited, StoreError
from headgate.hooks import logger
from headgate.http.exchange import NOT_GIVEN_BACK, SERVER_ERROR, Exchange
from headgate.http.headers import Asked, Field, TextField, all_fields, replaced
from headgate.http.limit import LimitMiddleware, RequestLimit
from headgate.http.problems import Answer, too_costly

__all__ = ["RateLimitMiddleware"]

Environ = MutableMapping[str, Any]
StartResponse = Callable[..., Callable[[bytes], object]]
App = Callable[[Environ, StartResponse], Iterable[bytes]]

EXCHANGE = "headgate.exchange"
"""Environment key under which the exchange is stored."""


class RateLimitMiddleware(LimitMiddleware[Limiter, App]):
    """Check every request against a limiter, and answer the refused ones.

    The arguments are those of `headgate.http.asgi.RateLimitMiddleware`, with a `Limiter`. Functions receive a scope built
    from the environment, which is under `"wsgi"`, and cannot be coroutine functions.
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
        answer = exchange.decide(self.limit, environ, scope)
        if answer is None:
            return self.app(environ, start_response)
        return send(environ, start_response, answer)


def respond(
    environ: Environ, start_response: StartResponse, app: Callable[[StartResponse], Iterable[bytes]]
) -> Iterable[bytes]:
    """Create an exchange, call the application in it, and end it when the response is sent."""
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
    """Start the response for an answer, and return its body."""
    start_response(f"{answer.status} {HTTPStatus(answer.status).phrase}", answer.headers)
    # A HEAD response has no body; the client would read it as the next response.
    return [] if environ.get("REQUEST_METHOD") == "HEAD" else [answer.body]


class WSGIExchange(Exchange[Limiter]):
    """An exchange that calls a function to start the response."""

    __slots__ = ()

    def decide(self, limit: RequestLimit[Limiter], environ: Environ, request: Any) -> Answer | None:
        """Check the request against a limit, and return the answer to send if it is refused. Preflights are not counted.

        Args:
            limit: The limit.
            environ: The request's environment.
            request: The argument for the functions of the limit.
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
        """Start the response, with the fields. An application may call it again to report an error."""
        self.started = True
        if self.holds:
            self.settle(int(status[:3]))
        write: Callable[[bytes], object] = self._deliver(
            status, replaced(headers, list(all_fields(self.asked).items())), *exc_info
        )
        return write

    def settle(self, status: int) -> None:
        """Settle the holds with their final costs."""
        _settle_all(self.final_costs(status))

    def end(self) -> None:
        """Release the places when the request ends."""
        _settle_all(self.over())


def decide(limit: RequestLimit[Limiter], request: Any, exchange: Exchange[Any] | None) -> Asked:
    """Check a request against a limit; holds are kept in the exchange until the response.

    Raises:
        CostTooHigh: The cost exceeds what the limit ever admits.
        ConfigError: A hold is needed but there is no exchange.
    """
    question = limit.question(request)
    version = limit.version  # read once: the limiter's policy may change while it decides
    quotas = run(version.own_quotas(question, request)) if version.quotas else None
    if version.holds:
        if exchange is None:
            raise ConfigError(
                "count= and concurrent rules need a middleware, such as headgate.http.django.rate_limits"
            )
        quota = version.by_name(quotas)
        hold = version.limiter.hold(question.key, question.cost, tier=question.tier, quota=quota)
        exchange.keep(version, limit, hold)
        decision = hold.decision
    else:
        if quotas is not None or type(question.cost) is not int:
            question = version.complete(question, quotas)
        decision, _ = version.limiter.gate.decide(question)
    return version.asked(question, decision, quotas)


def _settle_all(finals: Iterable[tuple[Any, Any]]) -> None:
    for hold, cost in finals:
        try:
            hold.settle(cost)
        except StoreError:
            logger.warning(NOT_GIVEN_BACK, hold.cost, exc_info=True)


class EndingBody:
    """A response body that ends the exchange when it is closed; WSGI servers always close it."""

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
    """A WSGI environment as an ASGI scope; header fields are collected on first access."""

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
        return self["headers"]  # type: ignore[no-any-return]  # set above
