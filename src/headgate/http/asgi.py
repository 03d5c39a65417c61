"""Limits for any ASGI application: a middleware without dependencies.

    app = RateLimitMiddleware(app, "100/minute")

Every response carries the fields, including 404s, errors and exceptions. Streaming responses are not buffered and no task is
started. WebSocket handshakes are limited like requests; other scope types pass through. If the application raises
`RateLimited`, for example through `guard`, the middleware answers with 429.

Wrap the whole application, as above: then every response passes through the middleware. `app.add_middleware(...)` works too,
but Starlette answers unhandled exceptions outside of it. For these the middleware itself sends Starlette's plain "Internal
Server Error" with the fields. Responses of custom exception handlers and of debug mode are unchanged and have no fields.
"""

from __future__ import annotations

from typing import Any

from headgate import AsyncLimiter
from headgate.errors import CostTooHigh, RateLimited
from headgate.http.exchange import (
    EXCHANGE,
    SERVER_ERROR,
    App,
    ASGIExchange,
    Message,
    Receive,
    Scope,
    Send,
    accepted_by,
    nowhere,
    respond,
)
from headgate.http.headers import all_fields, encoded
from headgate.http.limit import LimitMiddleware
from headgate.http.problems import Answer

__all__ = [
    "App",
    "Message",
    "RateLimitMiddleware",
    "Receive",
    "RefusalResponse",
    "Scope",
    "Send",
    "answer_refusal",
    "raised_answer",
    "respond",
]

KINDS = frozenset({"http", "websocket"})

# The exact response of Starlette and the servers to an unhandled exception.
_EXCEPTION = Answer(
    SERVER_ERROR,
    [(b"content-length", b"21"), (b"content-type", b"text/plain; charset=utf-8")],
    b"Internal Server Error",
)


class RateLimitMiddleware(LimitMiddleware[AsyncLimiter, App]):
    """Check every request and handshake against a limiter, and answer the refused ones.

    Args:
        app: The wrapped application.
        limiter: The limiter, possibly from a policy file; or a rule, counted in memory.
        key: The key to count by: a function of the scope, or one function per scope of the rules. Default: the client's
            address.
        cost: The number of units, or a function of the scope that returns it.
        tier: The name of the tier, or a function of the scope that returns it.
        quota: A quota that replaces the tier's: text, or a function of the scope that returns text or `None`.
        quota_for: Seconds to cache the result of the `quota` function per key, 60 by default; 0 calls it for every request.
        count: The statuses that count, like `{401, 403}`, `range(200, 300)` or a function of the status. The units are held
            while the application works, and returned if its response has another status. An accepted handshake has
            status 101, an exception 500; a cancelled request counts.
        exempt: Requests that are not limited, as paths or a function of the scope.
        address: The function that finds the client's address, see `by_address`. Used by default, and if `key` returns
            `None`.
        headers: The header fields to write: `"both"`, `"ietf"`, `"x-ratelimit"`, `"none"`, or a `Headers` object. Default:
            the setting of the limiter's policy, or else `"both"`.
        name: The limiter's name. This and all following arguments are only for a rule: a limiter has its own.
        store: The store that counts; by default a separate memory store. On a shared store, `name` is required.
        clock: The clock to use.
        on_store_error: The answer when the store is down; see `AsyncLimiter`.
        deadline: Seconds before a call to a network store is abandoned.
        hooks: Hooks called on every decision.

    The functions receive the ASGI scope; all except `exempt` may be coroutine functions.
    """

    kind = AsyncLimiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self.limit
        if scope["type"] not in KINDS or (limit.exempt is not None and limit.exempt(scope)):
            await self.app(scope, receive, send)
            return
        outer = scope.get("app")
        exchange: ASGIExchange | None = scope.get(EXCHANGE)
        is_first = exchange is None
        if exchange is None:
            exchange = scope[EXCHANGE] = ASGIExchange(send)
            send = exchange.send
        try:
            answer = await exchange.decide(limit, scope)
            if answer is None:
                await self.app(scope, receive, send)
            else:
                await respond(scope, receive, send, answer)
        except (RateLimited, CostTooHigh) as error:
            if exchange.started or scope["type"] != "http":
                raise
            await respond(scope, receive, send, exchange.raised(error, accepted_by(scope)))
        except Exception:  # units on hold are settled as for a 500
            if is_first and not exchange.started:
                await exchange.settle(SERVER_ERROR)
                if scope["type"] == "http" and self._answers_for(outer):
                    await respond(scope, receive, send, _EXCEPTION)
            raise
        finally:
            if is_first and exchange.places:
                await exchange.end()

    def _answers_for(self, outer: Any) -> bool:
        """Return whether the middleware must answer an exception, because nothing else would send more than a plain 500.

        `outer` is the Starlette application that the middleware was added to, or `None`.
        """
        if outer is None:
            return True
        added = getattr(outer, "user_middleware", None)
        if not added or getattr(added[0], "cls", None) is not type(self):
            return False  # a middleware between this one and the server may answer
        handlers = outer.exception_handlers
        return not (outer.debug or SERVER_ERROR in handlers or Exception in handlers)


def raised_answer(scope: Scope, error: RateLimited | CostTooHigh) -> Answer:
    """Return the answer to a raised refusal; the middleware, if installed, adds the fields."""
    exchange: ASGIExchange = scope.get(EXCHANGE) or ASGIExchange(nowhere)
    answer = exchange.raised(error, accepted_by(scope))
    if not exchange.sees_response:
        answer.fields.extend(encoded(all_fields(exchange.asked)))
    return answer


class RefusalResponse:
    """An `Answer` as an ASGI application, as exception handlers must return it."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await respond(scope, receive, send, self.answer)

    def to_asgi_response(self, *args: Any, **kwargs: Any) -> RefusalResponse:
        """Return the response itself; Litestar calls this on every response."""
        return self


def answer_refusal(request: Any, error: Any) -> RefusalResponse:
    """Return the response to a raised refusal; an exception handler for Starlette, Litestar and similar frameworks.

    `Starlette(exception_handlers={RateLimited: answer_refusal})`. These frameworks turn every unhandled exception into a
    500 before a middleware around them sees it.
    """
    return RefusalResponse(raised_answer(request.scope, error))
