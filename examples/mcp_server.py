"""An MCP server over stdio with a limit per tool. Run it from an MCP client with `python examples/mcp_server.py`."""

from mcp.server import MCPServer

from headgate import AsyncLimiter, sliding_window
from headgate.http.mcp import ToolLimitMiddleware

limiter = AsyncLimiter(
    sliding_window("2/minute", scope="tool"), name="tools", store="sqlite:///limits.db"
)  # or redis://…
server = MCPServer("clock", middleware=[ToolLimitMiddleware(limiter)])


@server.tool()
async def add(a: int, b: int) -> int:
    return a + b


if __name__ == "__main__":
    server.run(transport="stdio")
