"""One request and its response: the limits that were checked, and the fields that the response must carry.

Several limits may be checked for one request, some of them deep inside the application. The first check creates the
exchange and stores it in the scope (in WSGI, the environment) for later checks. When the response starts, the exchange
settles the holds that depend on its status, and adds the fields of all limits. Places of `concurrent` rules are held
until the request ends; the code that created the exchange always ends it, also after an exception.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from typing import Any, Generic, NoReturn

from headgate import AsyncLimiter, Hold
from headgate._steps import run_async
from headgate.decision import Decision
from headgate.errors import CostTooHigh, RateLimited, StoreError
from headgate.hooks import logger
from headgate.http.headers import Asked, Writer, all_fields, distinct_names, encoded, released, replaced
from headgate.http.limit import AnyLimiter, LimitVersion, RequestLimit
from headgate.http.problems import Answer, refusal, too_costly

Scope = MutableMapping[str, Any]
"""An ASGI scope: the description of a request or connection."""
Message = MutableMapping[str, Any]
"""An ASGI message."""
Receive = Callable[[], Awaitable[Message]]
"""The ASGI callable that returns the next message of the client."""
Send = Callable[[Message], Awaitable[None]]
"""The ASGI callable that sends a message to the client."""
App = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An ASGI application."""

EXCHANGE = "headgate"
"""Scope key under which the exchange is stored."""

STARTS = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})
"""Messages that carry the header fields of a response."""

SWITCHING_PROTOCOLS = 101
SERVER_ERROR = 500
POLICY_VIOLATION = 1008

NOT_GIVEN_BACK = "%s held units could not be given back"
"""Logged instead of raised: the response is worth more than the units, which expire by themselves."""

RAISED = Writer(())
"""Writes the fields of raised refusals. Their rules are unknown, so `RateLimit-Policy` is missing."""


class Exchange(Generic[AnyLimiter]):
    """The limits checked for one request, and the holds to settle with its response.

    Args:
        deliver: The function that sends the response: `send` of ASGI, `start_response` of WSGI; `nowhere` if the framework
            sends it.

    Attributes:
        asked: The result of each limit, in order.
        holds: Holds to settle when the status is known: the index in `asked`, the limit and the hold.
        places: Holds on places of `concurrent` rules, released when the request ends, each with its cost as known so far.
        started: Whether the response has started.
    """

    __slots__ = ("_deliver", "asked", "holds", "places", "started")

    def __init__(self, deliver: Callable[..., Any]) -> None:
        self._deliver = deliver
        self.asked: list[Asked] = []
        self.holds: list[tuple[int, RequestLimit[AnyLimiter], Any]] = []
        self.places: dict[Any, Any] = {}
        self.started = False

    @property
    def sees_response(self) -> bool:
        """Whether the response passes through this exchange, which then adds the fields."""
        return self._deliver is not nowhere

    @property
    def decision(self) -> Decision | None:
        """The decision of the most recent limit; `None` if no limit was checked."""
        return self.asked[-1][1] if self.asked else None

    def raised(self, error: RateLimited | CostTooHigh, accept: bytes | None) -> Answer:
        """Return the answer to a refusal that the application raised, for example through `guard`."""
        if isinstance(error, CostTooHigh):
            return too_costly(error, accept)
        self.asked.append((RAISED, error.decision, None, time.time_ns() // 1000))
        return self.refusal(accept)

    def refusal(self, accept: bytes | None) -> Answer:
        """Return the answer to a request that the most recent limit refused."""
        writer, decision, _, _ = self.asked[-1]
        names = writer.names if len(self.asked) == 1 else distinct_names(self.asked)[-1]
        return refusal(decision, names, accept)

    def keep(self, version: LimitVersion[AnyLimiter], limit: RequestLimit[AnyLimiter], hold: Any) -> None:
        """Keep a hold until the response."""
        self.holds.append((len(self.asked), limit, hold))
        if hold.allowed and version.limiter.units.has_places:
            self.places[hold] = hold.cost  # used if the request ends without a status

    def final_costs(self, status: int) -> Iterator[tuple[Any, Any]]:
        """Yield each hold to settle now, with its final cost: 0 if its limit does not count this status."""
        holds, self.holds = self.holds, []
        for place, limit, hold in holds:
            cost = hold.cost
            if hold.allowed and limit.counts is not None and not limit.counts(status):
                self.asked[place] = released(self.asked[place], hold.cost)
                cost = 0
            if hold in self.places:
                self.places[hold] = cost
            else:
                yield hold, cost

    def over(self) -> list[tuple[Any, Any]]:
        """Return the holds on places at the end of the request, with their final costs."""
        places, self.places = self.places, {}
        return list(places.items())


class ASGIExchange(Exchange[AsyncLimiter]):
    """An exchange whose response is sent in ASGI messages."""

    __slots__ = ()

    async def decide(
        self, limit: RequestLimit[AsyncLimiter], scope: Scope, request: Any = None
    ) -> Answer | None:
        """Check the request against a limit, and return the answer to send if it is refused. Preflights are not counted.

        Args:
            limit: The limit.
            scope: The request.
            request: The argument for the functions of the limit, if it is not the scope.
        """
        if is_preflight(scope):
            return None
        request = scope if request is None else request
        try:
            question = await limit.awaited_question(request) if limit.awaits else limit.question(request)
            version = limit.version  # read once: the limiter's policy may change while it decides
            quotas = await run_async(version.own_quotas(question, request)) if version.quotas else None
            if version.holds:
                quota, take = version.by_name(quotas), version.limiter.hold
                hold = await take(question.key, question.cost, tier=question.tier, quota=quota)
                self.keep(version, limit, hold)
                decision = hold.decision
            else:
                if quotas is not None or type(question.cost) is not int:
                    question = version.complete(question, quotas)
                decision, _ = await version.limiter.gate.decide(question)
        except CostTooHigh as error:
            return too_costly(error, accepted_by(scope))
        self.asked.append(version.asked(question, decision, quotas))
        return None if decision.allowed else self.refusal(accepted_by(scope))

    def send(self, message: Message) -> Awaitable[None]:
        """Forward a message of the application; add the fields to the start of its response."""
        # Not a coroutine function, which would slow down every message of a stream.
        if message["type"] in STARTS:
            self.started = True
            if self.holds:
                return self._settle_and_send(message)
            if self.asked:
                message = self._with_fields(message)
        sent: Awaitable[None] = self._deliver(message)
        return sent

    async def settle(self, status: int) -> None:
        """Settle the holds with their final costs."""
        await _settle_all(self.final_costs(status))

    async def end(self) -> None:
        """Release the places when the request ends, even if the task is cancelled again during the release."""
        if self.places:
            try:
                loop = asyncio.get_running_loop()
            except (
                RuntimeError
            ):  # the event loop was closed during the request and its task is being destroyed
                return
            task = loop.create_task(_settle_all(self.over()))
            _ending.add(task)  # the event loop keeps only a weak reference
            task.add_done_callback(_ending.discard)
            await asyncio.shield(task)

    async def _settle_and_send(self, message: Message) -> None:
        await self.settle(message.get("status", SWITCHING_PROTOCOLS))
        await self._deliver(self._with_fields(message))

    def _with_fields(self, message: Message) -> Message:
        # Copy the message: the application may send the same object every time.
        return {**message, "headers": replaced(message.get("headers", ()), encoded(all_fields(self.asked)))}


def nowhere(*response: object) -> NoReturn:
    """Placeholder for the function that sends a response, in an exchange through which no response passes."""
    raise AssertionError("nothing is sent through an exchange that does not see the response")


_ending: set[asyncio.Future[None]] = set()


async def _settle_all(finals: Iterable[tuple[Any, Any]]) -> None:
    for hold, cost in finals:
        try:
            if isinstance(hold, Hold):  # from a REST framework throttle, which runs in a thread
                await asyncio.to_thread(hold.settle, cost)
            else:
                await hold.settle(cost)
        except StoreError:
            logger.warning(NOT_GIVEN_BACK, hold.cost, exc_info=True)


async def respond(scope: Scope, receive: Receive, send: Send, answer: Answer) -> None:
    """Send an answer as the response."""
    kind = "http.response"
    if scope["type"] == "websocket":
        exchange: ASGIExchange | None = scope.get(EXCHANGE)
        is_open = exchange is not None and exchange.started
        if not is_open:
            await receive()  # the handshake must be received before it is answered
        if is_open or not can_deny(scope):
            # The server then answers the handshake with 403; no other status is possible here.
            await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": "Too many requests"})
            return
        kind = "websocket.http.response"
    await send({"type": f"{kind}.start", "status": answer.status, "headers": answer.fields})
    await send({"type": f"{kind}.body", "body": answer.body})


def can_deny(scope: Scope) -> bool:
    """Return whether the server can answer a WebSocket handshake with a response."""
    return "websocket.http.response" in scope.get("extensions", {})


def is_preflight(scope: Scope) -> bool:
    """Return whether this is a CORS preflight, which a browser sends before a cross-origin request."""
    if scope.get("method") != "OPTIONS":
        return False
    return {name for name, _ in scope["headers"]} >= {b"origin", b"access-control-request-method"}


def accepted_by(scope: Scope) -> bytes | None:
    """Return the `Accept` field of a request."""
    accept: bytes | None = None
    for name, value in scope["headers"]:
        if name == b"accept":
            accept = value if accept is None else accept + b"," + value
    return accept
