"""Limits for the tools of MCP servers, without the packages of a server: keys, costs, refusals, and their HTTP status."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from headgate import AsyncLimiter
from headgate._checks import check_kind
from headgate.costs import Cost
from headgate.decision import Decision
from headgate.errors import ConfigError, CostTooHigh, listed
from headgate.http.exchange import App, Message, Receive, Scope, Send
from headgate.http.headers import retry_seconds
from headgate.http.keys import check_function
from headgate.keys import Key
from headgate.quotas import QuotaValue, quotas_of
from headgate.rules import Rule, scopes_of

SCOPES = frozenset({"user", "tool", "session"})
"""The scopes that the default key has."""

REFUSED = -32000
"""The JSON-RPC code of a refusal, the first code that servers may define."""

NOBODY = "anonymous"
"""The user of calls without an access token."""

_MARK = "headgate.refused"


class ToolCall(NamedTuple):
    """A call of a tool.

    Attributes:
        tool: The tool's name.
        arguments: The arguments.
        user: The user or client of the access token; `None` without one.
        session: The session; `None` where the protocol version or the transport has none.
        request: The HTTP request, a Starlette `Request`; `None` over stdio.
    """

    tool: str
    arguments: Mapping[str, Any]
    user: str | None
    session: str | None
    request: Any


class ToolRefusal(NamedTuple):
    """A refusal as a JSON-RPC error."""

    code: int
    message: str
    data: dict[str, Any]


class ToolLimits:
    """The limits of a server's tools.

    Args:
        limiter: An `AsyncLimiter`, or a rule.
        key: A function from a `ToolCall` to its key. By default the user, or a mapping with `user`, `tool` and `session` if
            the rules have these scopes. A call without a session has the user as its session.
        costs: The cost of each tool that does not cost 1.
        quotas: The quota of each tool that has its own: text, or a mapping by rule name.
    """

    def __init__(
        self,
        limiter: AsyncLimiter | Rule | str,
        *,
        key: Callable[[ToolCall], Key] | None = None,
        costs: Mapping[str, Cost] | None = None,
        quotas: Mapping[str, QuotaValue] | None = None,
    ) -> None:
        if isinstance(limiter, str | Rule):
            limiter = AsyncLimiter(limiter)
        self.limiter = check_kind("limiter", limiter, AsyncLimiter, "an AsyncLimiter or a rule")
        self._scopes = scopes_of(limiter.current.rules)
        if key is not None:
            check_function("key=", key, can_await=False)
        elif unknown := set(self._scopes) - SCOPES:
            raise ConfigError(
                f"calls of tools have the scopes {listed(SCOPES)}, not {listed(unknown)}: write key=function"
            )
        self._key, self._costs, self._quotas = key, dict(costs or {}), dict(quotas or {})
        for tool, cost in self._costs.items():
            limiter.units.costs(cost)  # raises if the cost is not valid
            check_kind("the name of a tool", tool, str, "text")
        for quota in self._quotas.values():
            quotas_of(limiter.current.rules, quota)

    @asynccontextmanager
    async def applied(self, call: ToolCall) -> AsyncIterator[ToolRefusal | None]:
        """Charge a call and hold its places during the block; the value is the refusal, if it is refused."""
        key, cost, quota = self._key_of(call), self._costs.get(call.tool, 1), self._quotas.get(call.tool)
        hold = None
        try:
            if self.limiter.units.has_places:
                hold = await self.limiter.hold(key, cost, quota=quota)
                decision = hold.decision
            else:
                decision = await self.limiter.hit(key, cost, quota=quota)
        except CostTooHigh as error:
            yield ToolRefusal(REFUSED, str(error), {})
            return
        try:
            yield None if decision.allowed else refused(call, decision)
        finally:  # also after an exception: the call counts, only its places are freed
            if hold is not None and hold.allowed:
                await hold.settle(cost)

    def _key_of(self, call: ToolCall) -> Key:
        if self._key is not None:
            return self._key(call)
        user = call.user or NOBODY
        if not self._scopes:
            return user
        parts = {"user": user, "tool": call.tool, "session": call.session or user}
        return {scope: parts[scope] for scope in self._scopes}


def refused(call: ToolCall, decision: Decision) -> ToolRefusal:
    """Return the refusal of a call, and mark its HTTP request for `RefusalStatus`."""
    seconds = retry_seconds(decision)
    if call.request is not None and (marks := call.request.scope.get(_MARK)) is not None:
        marks.append(seconds)
    data: dict[str, Any] = {"deniedBy": decision.denied_by}
    if seconds is None:
        return ToolRefusal(REFUSED, f"Too many calls of {call.tool}.", data)
    data["retryAfterSeconds"] = seconds
    return ToolRefusal(REFUSED, f"Too many calls of {call.tool}; retry after {seconds} s.", data)


class RefusalStatus:
    """ASGI middleware around an MCP server that answers refused calls with 429 and `Retry-After`.

    Only responses that are not streams change: with Server-Sent Events, the status is sent before the call begins.

    Args:
        app: The server's ASGI application.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        marks: list[int | None] = []

        async def replace_status(message: Message) -> None:
            if message["type"] == "http.response.start" and marks and not _is_stream(message):
                fields = [] if marks[0] is None else [(b"retry-after", b"%d" % marks[0])]
                message = {**message, "status": 429, "headers": [*message.get("headers", ()), *fields]}
            await send(message)

        await self._app({**scope, _MARK: marks}, receive, replace_status)


def _is_stream(message: Message) -> bool:
    headers = dict(message.get("headers", ()))
    return bool(headers.get(b"content-type", b"").startswith(b"text/event-stream"))
