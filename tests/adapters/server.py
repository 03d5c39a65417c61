"""MCP servers with limits, for check_mcp.py: `python -m tests.adapters.server (official|fast) (stdio|http) URL PORT`."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn

from headgate import AsyncLimiter, concurrent, sliding_window
from headgate.http.tools import RefusalStatus

COSTS = {"search": {"calls": 3, "places": 1}}


def limiter(url: str) -> AsyncLimiter:
    """Return the limiter, shared by all servers."""
    return AsyncLimiter(
        sliding_window("12/minute", scope="user", unit="calls", name="calls"),
        concurrent(2, lease="1m", scope="tool", unit="places", name="running"),
        name="tools",
        store=url,
        on_store_error="raise",
    )


def official(url: str) -> Any:
    """Return a server of the official package."""
    from mcp.server import MCPServer

    from headgate.http.mcp import ToolLimitMiddleware

    server = MCPServer("official", middleware=[ToolLimitMiddleware(limiter(url), costs=COSTS)])
    add_tools(server.tool)
    return server


def fast(url: str) -> Any:
    """Return a server of FastMCP."""
    from fastmcp import FastMCP

    from headgate.http.fastmcp import FastMCPLimitMiddleware

    server = FastMCP("fast", middleware=[FastMCPLimitMiddleware(limiter(url), costs=COSTS)])
    add_tools(server.tool)
    return server


def add_tools(tool: Any) -> None:
    """Add the tools of both servers."""

    @tool()
    async def echo(text: str) -> str:
        return text

    @tool()
    async def search(text: str) -> str:
        return text

    @tool()
    async def fail() -> str:
        raise ValueError("it failed")


def main() -> None:
    """Run a server."""
    kind, transport, url, port = sys.argv[1:]
    server = {"official": official, "fast": fast}[kind](url)
    if transport == "stdio":
        server.run(transport="stdio")
        return
    make = server.streamable_http_app if kind == "official" else server.http_app
    options: dict[str, Any] = {} if port.startswith("s") else {"json_response": True}
    app = RefusalStatus(make(**options))
    uvicorn.run(app, port=int(port.lstrip("s")), log_level="critical")


if __name__ == "__main__":
    main()
