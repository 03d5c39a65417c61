"""Limits for FastMCP: `server.add_middleware(FastMCPLimitMiddleware("10/minute"))`."""

from __future__ import annotations

from typing import Any

from headgate._extras import needing
from headgate.http.mcp import session_of, user_of
from headgate.http.tools import RefusalStatus, ToolCall, ToolLimits

with needing("headgate.http.fastmcp", "fastmcp"):
    from fastmcp.server.dependencies import get_access_token
    from fastmcp.server.middleware import Middleware
    from mcp import MCPError

__all__ = ["FastMCPLimitMiddleware", "RefusalStatus", "ToolCall"]


class FastMCPLimitMiddleware(ToolLimits, Middleware):  # type: ignore[misc]
    """Middleware of a `FastMCP` server that limits calls of tools.

    A refused call is answered with an MCP error that has `retryAfterSeconds` in its data. Places of a `concurrent` rule are
    held while the tool runs.
    """

    async def on_call_tool(self, context: Any, call_next: Any) -> Any:
        """Handle a call of a tool."""
        found = context.fastmcp_context
        own = None if found is None else found.request_context
        request = None if own is None else own.request
        message = context.message
        call = ToolCall(
            message.name, message.arguments or {}, user_of(get_access_token()), session_of(request), request
        )
        async with self.applied(call) as refusal:
            if refusal is not None:
                raise MCPError(*refusal)
            return await call_next(context)
