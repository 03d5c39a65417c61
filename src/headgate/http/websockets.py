"""Limits for the messages of WebSockets, for Starlette, FastAPI and every other ASGI application.

limit = MessageLimit("10/second")

@app.websocket("/chat")
async def chat(websocket: WebSocket) -> None:
    await websocket.accept()
    async for text in websocket.iter_text():
        if not await limit.message(websocket):
            break  # the limit has closed the connection

app = limit.wrap(app)  # or: all WebSockets of an application
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from headgate import AsyncLimiter, Rule
from headgate.costs import Cost
from headgate.decision import Decision
from headgate.errors import ConfigError
from headgate.http.exchange import POLICY_VIOLATION, App, ASGIExchange, Message, Receive, Scope, Send, nowhere
from headgate.http.limit import Keys, RequestLimit, RequestQuota, Tier, rule_of

__all__ = ["MessageLimit"]

_COST = "headgate.cost"


class MessageLimit:
    """A limit for the messages that WebSockets receive.

    Args:
        limiter: An `AsyncLimiter`, or a rule, counted in memory.
        key: The key to count by: a function of the scope, or one function per scope of the rules. Default: the client's
            address, so that several connections of a client count together.
        tier: The name of the tier, or a function of the scope that returns it.
        quota: A quota that replaces the tier's, or a function of the scope that returns it.
        address: The function that finds the client's address, see `by_address`.
        code: The close code of a connection whose message is refused.
        reason: The reason that is sent with the close code.
        on_refusal: A coroutine function that is called with the WebSocket and the decision instead of closing it. In an
            application that is wrapped, it is called with the ASGI `send` instead of the WebSocket, and the application does
            not receive the message.

    Raises:
        ConfigError: A rule is `concurrent`: a message holds no place. Limit the handshakes instead.
    """

    def __init__(
        self,
        limiter: AsyncLimiter | Rule | str,
        *,
        key: Keys | None = None,
        tier: Tier = None,
        quota: RequestQuota = None,
        address: Callable[[Any], str] | None = None,
        code: int = POLICY_VIOLATION,
        reason: str = "Too many messages",
        on_refusal: Callable[[Any, Decision], Awaitable[None]] | None = None,
    ) -> None:
        if not isinstance(limiter, AsyncLimiter):
            limiter = AsyncLimiter(rule_of(limiter, AsyncLimiter))
        if limiter.units.has_places:
            raise ConfigError(
                "a message holds no place: limit handshakes with RateLimitMiddleware and this rule"
            )
        self._limit = RequestLimit(
            limiter,
            key=key,
            cost=lambda scope: scope[_COST],
            tier=tier,
            quota=quota,
            address=address,
            headers="none",
        )
        self._code, self._reason, self._on_refusal = code, reason, on_refusal

    async def message(self, websocket: Any, cost: Cost = 1) -> Decision:
        """Count a message that was received. If it is refused, close the WebSocket, or call `on_refusal`.

        Args:
            websocket: The WebSocket of Starlette or FastAPI.
            cost: The cost of the message.
        """
        decision = await self._decide(websocket.scope, cost)
        if not decision.allowed:
            if self._on_refusal is None:
                await websocket.close(code=self._code, reason=self._reason)
            else:
                await self._on_refusal(websocket, decision)
        return decision

    def wrap(self, app: App, cost: Callable[[Message], Cost] | None = None) -> App:
        """Return an ASGI application in which every message of a WebSocket is limited.

        Args:
            app: The application.
            cost: A function from the ASGI message to its cost, for example of its size.
        """

        async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "websocket":
                await app(scope, receive, send)
                return

            async def receive_limited() -> Message:
                while True:
                    message: Message = await receive()
                    if message["type"] != "websocket.receive":
                        return message
                    decision = await self._decide(scope, 1 if cost is None else cost(message))
                    if decision.allowed:
                        return message
                    if self._on_refusal is None:
                        await send({"type": "websocket.close", "code": self._code, "reason": self._reason})
                        return {"type": "websocket.disconnect", "code": self._code, "reason": self._reason}
                    await self._on_refusal(send, decision)

            await app(scope, receive_limited, send)

        return wrapped

    async def _decide(self, scope: Scope, cost: Cost) -> Decision:
        exchange = ASGIExchange(nowhere)
        await exchange.decide(self._limit, scope, {**scope, _COST: cost})
        if exchange.decision is None:  # the cost is above the capacity: never admitted
            return Decision.make((), [(False, 0, 0, None, None)])
        return exchange.decision
