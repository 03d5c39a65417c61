"""One request and its response, in ASGI: who was asked about it, and what the response has to carry because of it.

Several limits may be asked about one request, some of them deep inside of the application. Whoever is asked first begins the
exchange and puts it into the scope; the others find it there. When the response starts, the exchange settles what depends on
its status, and adds the fields of all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from headgate import AsyncHold, AsyncLimiter
from headgate.decision import Decision
from headgate.errors import StoreError
from headgate.hooks import logger
from headgate.http.headers import Asked, Field, all_fields, distinct_names, released
from headgate.http.limit import RequestLimit
from headgate.http.problems import Answer, refusal

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

EXCHANGE = "headgate"
"""Where a scope has its exchange."""

STARTS = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})
"""Messages that carry the header fields of a response."""

SWITCHING_PROTOCOLS = 101
SERVER_ERROR = 500
POLICY_VIOLATION = 1008


class Exchange:
    """A request on its way through the limits, and the response on its way back.

    Attributes:
        asked: Who was asked, in order.
        fields: What to write if nobody else is asked; `None` if that is not prepared.
        started: Whether the response has started.
    """

    # Values to begin with are those of the class: most requests never change most of them.
    asked: Sequence[Asked] = ()
    fields: list[Field] | None = None
    started = False
    _holds: Sequence[tuple[int, RequestLimit[AsyncLimiter], AsyncHold]] = ()

    def __init__(self, send: Send) -> None:
        self._send = send

    async def ask(self, limit: RequestLimit[AsyncLimiter], request: Any) -> Decision:
        """Ask a limit about the request, and note what it says for the response.

        Raises:
            CostTooHigh: The request costs more than could ever be admitted.
        """
        key, cost, tier = await limit.awaited_question(request) if limit.awaits else limit.question(request)
        way = limit.way  # once: the limiter's policy may change while it decides
        if limit.counts is None:
            decision = await way.limiter.hit(key, cost, tier=tier)
        else:
            hold = await way.limiter.hold(key, cost, tier=tier)
            decision = hold.decision
            self._holds = [*self._holds, (len(self.asked), limit, hold)]
        if way.tier_for is not None:
            tier = way.tier_for(key, tier)
        self.asked = [*self.asked, (way.writer, decision, tier, limit.now_us())]
        return decision

    def send(self, message: Message) -> Awaitable[None]:
        """Send a message of the application on; the start of its response with the fields."""
        # Not a coroutine function: that would be a detour for every message of a stream.
        if message["type"] in STARTS:
            self.started = True
            fields = self.fields
            if fields is None or len(self.asked) > 1:
                return self._settle_and_send(message)
            # A new message: the application may send the very same one every time.
            message = {**message, "headers": [*message.get("headers", ()), *fields]}
        return self._send(message)

    async def settle(self, status: int) -> None:
        """Make final what was held: give it back if the limit does not count this status."""
        holds, self._holds = self._holds, ()
        for place, limit, hold in holds:
            if not hold.allowed or limit.counts is None or limit.counts(status):
                await hold.settle(hold.cost)
                continue
            self.asked = [
                *self.asked[:place],
                released(self.asked[place], hold.cost),
                *self.asked[place + 1 :],
            ]
            try:
                await hold.release()
            except StoreError:
                # The response is worth more than the units, which expire by themselves.
                logger.warning("%d held units could not be given back", hold.cost, exc_info=True)

    def all_fields(self) -> list[Field]:
        """Return the fields of all who were asked so far."""
        return self.fields if self.fields is not None and len(self.asked) == 1 else all_fields(self.asked)

    def refusal(self, scope: Scope) -> Answer:
        """Return the answer to a request that the limit which was asked last has refused."""
        writer, decision, _, _ = self.asked[-1]
        names = writer.names if len(self.asked) == 1 else distinct_names(self.asked)[-1]
        return refusal(decision, names, accepted_by(scope))

    async def _settle_and_send(self, message: Message) -> None:
        if self.asked:
            await self.settle(message.get("status", SWITCHING_PROTOCOLS))
            message = {**message, "headers": [*message.get("headers", ()), *self.all_fields()]}
        await self._send(message)


async def respond(scope: Scope, receive: Receive, send: Send, answer: Answer) -> None:
    """Send a response of ours."""
    kind = "http.response"
    if scope["type"] == "websocket":
        await receive()  # the handshake, which has to be heard before it is answered
        if "websocket.http.response" not in scope.get("extensions", {}):
            # The server then answers 403, for want of another word.
            await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": "Too many requests"})
            return
        kind = "websocket.http.response"
    await send({"type": f"{kind}.start", "status": answer.status, "headers": answer.fields})
    await send({"type": f"{kind}.body", "body": answer.body})


def accepted_by(scope: Scope) -> bytes | None:
    """Return the `Accept` field of a request."""
    fields = [value for name, value in scope["headers"] if name == b"accept"]
    return b",".join(fields) if fields else None
