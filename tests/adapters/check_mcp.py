"""Tests of limits for tools, with real servers over stdio and HTTP and a real Redis: tools/test_adapters.sh."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
import redis
from mcp import Client, MCPError, StdioServerParameters

from headgate import AsyncLimiter, ConfigError, concurrent, sliding_window
from headgate.http.fastmcp import FastMCPLimitMiddleware
from headgate.http.mcp import ToolCall, ToolLimitMiddleware
from tests.adapters.server import COSTS, add_tools

KINDS = ["official", "fast"]
PROGRAM = [sys.executable, "-m", "tests.adapters.server"]


@pytest.fixture
def url(headgate_redis_url: str) -> str:
    """An empty Redis."""
    with redis.from_url(headgate_redis_url) as client:
        client.flushall()
    return headgate_redis_url


def make(kind: str, limiter: AsyncLimiter | str, **options: Any) -> Any:
    """Return a server in this process."""
    if kind == "official":
        from mcp.server import MCPServer

        server: Any = MCPServer("official", middleware=[ToolLimitMiddleware(limiter, **options)])
    else:
        from fastmcp import FastMCP

        server = FastMCP("fast", middleware=[FastMCPLimitMiddleware(limiter, **options)])
    add_tools(server.tool)
    return server


def connect(kind: str, server: Any) -> Any:
    if kind == "official":
        return Client(server)
    from fastmcp import Client as FastClient

    return FastClient(server)


async def call(client: Any, tool: str = "echo") -> str | dict[str, Any]:
    """Return the answer of a tool, or the data of the refusal."""
    try:
        await client.call_tool(tool, {} if tool == "fail" else {"text": "x"})
    except MCPError as error:
        return error.data or {"code": error.code}
    except Exception as error:  # noqa: BLE001  # FastMCP's client raises the error of a tool
        return str(error)
    return "answered"


@pytest.mark.parametrize("kind", KINDS)
async def test_refused_call_is_an_error_with_a_time(kind: str) -> None:
    limiter = AsyncLimiter("3/minute")
    async with connect(kind, make(kind, limiter)) as client:
        assert [await call(client) for _ in range(3)] == ["answered"] * 3
        refusal = await call(client)
        assert isinstance(refusal, dict)
        assert 1 <= refusal["retryAfterSeconds"] <= 61
        assert refusal["deniedBy"] == "per-minute"
        await client.list_tools()  # only calls of tools are limited


@pytest.mark.parametrize("kind", KINDS)
async def test_tools_have_their_own_costs_and_quotas(kind: str) -> None:
    limiter = AsyncLimiter(sliding_window("4/minute", scope="tool", name="calls"))
    options = {"costs": {"search": 3}, "quotas": {"echo": {"calls": "1/minute"}}}
    async with connect(kind, make(kind, limiter, **options)) as client:
        assert await call(client, "search") == "answered"
        assert isinstance(await call(client, "search"), dict)
        assert await call(client) == "answered"
        assert isinstance(await call(client), dict)


@pytest.mark.parametrize("kind", KINDS)
async def test_places_are_free_after_the_tool_ends(kind: str) -> None:
    limiter = AsyncLimiter(concurrent(1, lease="1m"))
    async with connect(kind, make(kind, limiter)) as client:
        for tool in ("echo", "fail", "echo"):
            await call(client, tool)
        assert (await limiter.check("anonymous")).allowed
        hold = await limiter.hold("anonymous")
        assert isinstance(await call(client), dict)
        await hold.release()
        assert await call(client) == "answered"


@pytest.mark.parametrize("kind", KINDS)
async def test_cost_above_the_capacity_is_refused_without_a_time(kind: str) -> None:
    async with connect(kind, make(kind, AsyncLimiter("2/minute"), costs={"echo": 3})) as client:
        assert await call(client) == {"code": -32000}


def test_key_and_mistakes_in_arguments() -> None:
    limits = ToolLimitMiddleware(AsyncLimiter("1/minute"), key=lambda call: f"{call.user}:{call.tool}")
    assert limits._key_of(ToolCall("echo", {}, "ann", None, None)) == "ann:echo"
    scoped = ToolLimitMiddleware(
        AsyncLimiter(sliding_window("1/s", scope="session"), sliding_window("1/s", scope="user", name="user"))
    )
    assert scoped._key_of(ToolCall("echo", {}, "ann", None, None)) == {"user": "ann", "session": "ann"}
    assert scoped._key_of(ToolCall("echo", {}, "ann", "s1", None)) == {"user": "ann", "session": "s1"}
    with pytest.raises(
        ConfigError, match=r"^calls of tools have the scopes .*, not 'realm': write key=function$"
    ):
        ToolLimitMiddleware(AsyncLimiter(sliding_window("1/s", scope="realm")))


# --- Several processes -----------------------------------------------------------------------------------------------


@contextmanager
def serving(kind: str, url: str, streams: bool = False) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    process = subprocess.Popen([*PROGRAM, kind, "http", url, f"{'s' if streams else ''}{port}"])
    try:
        while process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)  # nothing signals that the port is open
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        process.wait()


async def test_four_processes_over_http_admit_exactly_the_limit(url: str) -> None:
    with (
        serving("official", url) as first,
        serving("fast", url) as second,
        serving("official", url, streams=True) as third,
        serving("fast", url, streams=True) as fourth,
    ):

        async def ask(server: str) -> list[str | dict[str, Any]]:
            async with Client(server) as client:
                return [await call(client) for _ in range(6)]

        answers = await asyncio.gather(*map(ask, (first, second, third, fourth)))
    found = Counter("refused" if isinstance(answer, dict) else answer for part in answers for answer in part)
    # Four concurrent calls may also exceed the two places of the tool; such a refusal costs nothing.
    assert found["answered"] + found["refused"] == 24
    assert found["answered"] <= 12
    if all(answer == "answered" or answer["deniedBy"] == "calls" for part in answers for answer in part):  # type: ignore[index]
        assert found["answered"] == 12


async def test_four_processes_over_stdio_admit_exactly_the_limit(url: str) -> None:
    async def ask(kind: str) -> list[str | dict[str, Any]]:
        server = StdioServerParameters(command=PROGRAM[0], args=[*PROGRAM[1:], kind, "stdio", url, "0"])
        async with Client(server) as client:
            return [await call(client) for _ in range(6)]

    answers = [await ask(kind) for kind in KINDS * 2]
    assert [[answer == "answered" for answer in part] for part in answers] == [
        [True] * 6,
        [True] * 6,
        [False] * 6,
        [False] * 6,
    ]


@pytest.mark.parametrize("kind", KINDS)
async def test_refused_call_over_http_has_status_429(kind: str, url: str) -> None:
    request = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": "search", "arguments": {"text": "x"}},
    }
    opening = {
        "jsonrpc": "2.0",
        "id": 0,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "test", "version": "1"},
        },
    }
    headers = {"accept": "application/json, text/event-stream"}
    with serving(kind, url) as server, httpx2.Client(headers=headers) as client:
        opened = client.post(server, json=opening)
        assert opened.status_code == 200
        client.headers["mcp-session-id"] = opened.headers["mcp-session-id"]
        client.post(server, json={"jsonrpc": "2.0", "method": "notifications/initialized"})
        statuses = [client.post(server, json=request) for _ in range(12 // COSTS["search"]["calls"] + 1)]
    assert [answer.status_code for answer in statuses] == [200] * 4 + [429]
    assert 1 <= int(statuses[-1].headers["retry-after"]) <= 61
    assert statuses[-1].json()["error"]["data"]["retryAfterSeconds"] == int(
        statuses[-1].headers["retry-after"]
    )
