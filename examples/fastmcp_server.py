"""A FastMCP server over stdio with a limit. Run it from an MCP client with `python examples/fastmcp_server.py`."""

from fastmcp import FastMCP

from headgate.http.fastmcp import FastMCPLimitMiddleware

server = FastMCP("clock", middleware=[FastMCPLimitMiddleware("2/minute")])


@server.tool()
async def add(a: int, b: int) -> int:
    return a + b


if __name__ == "__main__":
    server.run(transport="stdio", show_banner=False)
