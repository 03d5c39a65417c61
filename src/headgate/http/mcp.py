"""Limits for the official MCP server: `MCPServer("name", middleware=[ToolLimitMiddleware("10/minute")])`."""

from __future__ import annotations

from typing import Any

from headgate._extras import needing
from headgate.http.tools import RefusalStatus, ToolCall, ToolLimits

with needing("headgate.http.mcp", "mcp"):
    from mcp import MCPError
    from mcp.server.auth.middleware.auth_context import get_access_token

__all__ = ["RefusalStatus", "ToolCall", "ToolLimitMiddleware"]


class ToolLimitMiddleware(ToolLimits):
    """Middleware of an `MCPServer` or a low-level `Server` that limits calls of tools.

    A refused call is answered with an MCP error that has `retryAfterSeconds` in its data. Places of a `concurrent` rule are
    held while the tool runs.
    """

    async def __call__(self, ctx: Any, call_next: Any) -> Any:
        """Handle a message."""
        if ctx.method != "tools/call" or ctx.request_id is None:
            return await call_next(ctx)
        params = ctx.params or {}
        call = ToolCall(
            str(params.get("name")),
            params.get("arguments") or {},
            user_of(get_access_token()),
            session_of(ctx.request),
            ctx.request,
        )
        async with self.applied(call) as refusal:
            if refusal is not None:
                raise MCPError(*refusal)
            return await call_next(ctx)


def user_of(token: Any) -> str | None:
    """Return the user of an access token, or else its client."""
    if token is None:
        return None
    claims = getattr(token, "claims", None) or {}
    user = getattr(token, "subject", None) or claims.get("sub") or token.client_id
    return str(user) if user else None


def session_of(request: Any) -> str | None:
    """Return the session of an HTTP request; `None` where the protocol has none."""
    return None if request is None else request.headers.get("mcp-session-id")
