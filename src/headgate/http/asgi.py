"""Limits for any ASGI application: a middleware without dependencies.

    app = RateLimitMiddleware(app, "100/minute")

Every response carries the fields, also those of 404, of errors and of exceptions. A streaming response streams: nothing is
buffered, no task is started. WebSocket handshakes are limited like requests. Everything else passes through. A `RateLimited`
that the application raises, as `guard` does, is answered with 429.

Around a whole application (as above) is the best place: nothing answers outside of it. `app.add_middleware(...)` works too;
but what Starlette answers to an exception is then written outside. Its plain "Internal Server Error" is written by the
middleware instead, with the fields; a handler of your own and the page of debug mode are left alone, and go without.
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

# What Starlette and the servers answer to an exception, to the letter.
_EXCEPTION = Answer(
    SERVER_ERROR,
    [(b"content-length", b"21"), (b"content-type", b"text/plain; charset=utf-8")],
    b"Internal Server Error",
)


class RateLimitMiddleware(LimitMiddleware[AsyncLimiter, App]):
    """Asks a limiter about every request and handshake, and answers those that it refuses.

    Args:
        app: The application behind it.
        limiter: Decides; it may be one of a policy file. Or a rule, counted in memory.
        key: Whose units: a function of the scope, or one for each scope of the rules. By default the client's address.
        cost: How many units, as a number or a function of the scope.
        tier: Which tier, as a name or a function of the scope.
        quota: By which quota, if not by that of the tier: text, or a function of the scope that returns it, or `None`.
        quota_for: Seconds for which its answer about a key is kept, by default 60; 0 asks it for every request.
        count: Which statuses count, as `{401, 403}`, `range(200, 300)` or a function of the status. The units are held
            while the application works, and given back if its answer has another status. A handshake that is accepted
            has status 101, an exception 500; a request that is cancelled counts.
        exempt: Which requests are let through unasked, as paths or a function of the scope.
        address: How the client's address is found; see `by_address`. Used by default, and where `key` returns `None`.
        headers: Which header fields to write: `"both"`, `"ietf"`, `"x-ratelimit"`, `"none"`, or `Headers` for what these do
            not say; by default what the limiter's policy says, or else `"both"`.

    Key, cost, tier, quota and exempt see the ASGI scope; all but the last may be coroutine functions.
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
            answer = await exchange.ask(limit, scope)
            if answer is None:
                await self.app(scope, receive, send)
            else:
                await respond(scope, receive, send, answer)
        except (RateLimited, CostTooHigh) as error:
            if exchange.started or scope["type"] != "http":
                raise
            await respond(scope, receive, send, exchange.raised(error, accepted_by(scope)))
        except Exception:  # whatever it is, units that are held are settled as for a 500
            if is_first and not exchange.started:
                await exchange.settle(SERVER_ERROR)
                if scope["type"] == "http" and self._answers_for(outer):
                    await respond(scope, receive, send, _EXCEPTION)
            raise
        finally:
            if is_first and exchange.places:
                await exchange.end()

    def _answers_for(self, outer: Any) -> bool:
        """Return whether no one else would answer to an exception with more than a plain 500.

        `outer` is the Starlette application that the middleware was added to, if any.
        """
        if outer is None:
            return True
        added = getattr(outer, "user_middleware", None)
        if not added or getattr(added[0], "cls", None) is not type(self):
            return False  # a middleware between us and the server may have an answer
        handlers = outer.exception_handlers
        return not (outer.debug or SERVER_ERROR in handlers or Exception in handlers)


def raised_answer(scope: Scope, error: RateLimited | CostTooHigh) -> Answer:
    """Return the answer to a refusal that was raised; the middleware adds the fields, if there is one."""
    exchange: ASGIExchange = scope.get(EXCHANGE) or ASGIExchange(nowhere)
    answer = exchange.raised(error, accepted_by(scope))
    if not exchange.sees_response:
        answer.fields.extend(encoded(all_fields(exchange.asked)))
    return answer


class RefusalResponse:
    """An answer of ours as an ASGI application, which is what a handler of exceptions returns."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await respond(scope, receive, send, self.answer)

    def to_asgi_response(self, *args: Any, **kwargs: Any) -> RefusalResponse:
        """Return itself: Litestar asks every response for this."""
        return self


def answer_refusal(request: Any, error: Any) -> RefusalResponse:
    """Return the response to a refusal that was raised; for Starlette, Litestar and others that have handlers of exceptions.

    `Starlette(exception_handlers={RateLimited: answer_refusal})`. They answer to every exception themselves, with 500, so a
    middleware around them would come too late.
    """
    return RefusalResponse(raised_answer(request.scope, error))
