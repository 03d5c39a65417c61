"""The CPU time that a limit adds to one request of a FastAPI application, in this process.

    python -m benchmarks.http [--quick]

Every peer counts in memory and is configured as its documentation recommends; a comment names the page. A request is a call
of the ASGI application without a server or a client, so that only the application and the limit are measured. The cost of a
limit is the difference to the same application without a limit: the median of the differences within each round. Headgate
writes all header fields; of the others only slowapi can write some of them, and does so here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

from benchmarks.harness import (
    HEADGATE,
    Runner,
    Scale,
    Section,
    Target,
    announce,
    each,
    interleave,
    main,
    notes,
    number,
    table,
)

BARE = "no limit"
FLOOR = "floor: empty dependency"
PLENTY = 1_000_000_000

Build = Callable[[int], Any]
"""Builds an application that admits a number of requests per hour; an application without a limit ignores the number."""


def fastapi(dependency: Any = None) -> Any:
    """Build the application; its route may have a dependency."""
    from fastapi import Depends, FastAPI

    app = FastAPI()

    @app.get("/", dependencies=[Depends(dependency)] if dependency else [])
    async def home() -> dict[str, str]:
        return {"hello": "world"}

    return app


def fastapi_floor(limit: int) -> Any:
    """Build the application with a dependency that does nothing."""

    async def nothing() -> None: ...

    return fastapi(nothing)


def fastapi_headgate(limit: int) -> Any:
    """Build Headgate, with all fields on every response."""
    from headgate.http.fastapi import install
    from headgate.http.fastapi import limit as limit_to

    app = fastapi(limit_to(f"{limit}/hour"))
    install(app)
    return app


# https://throttled-py.readthedocs.io: it does not support FastAPI; this is the dependency that a user would write.
def fastapi_throttled(limit: int) -> Any:
    """Build throttled-py as a dependency."""
    import throttled.asyncio as package
    from fastapi import HTTPException, Request

    throttle = package.Throttled(
        using="sliding_window",
        quota=package.per_duration(timedelta(hours=1), limit, limit),
        store=package.MemoryStore(),
    )

    async def limited(request: Request) -> None:
        result = await throttle.limit(request.client.host if request.client else "")
        if result.limited:
            raise HTTPException(429)

    limited.__annotations__["request"] = Request  # FastAPI would resolve the name in this module
    return fastapi(limited)


# https://slowapi.readthedocs.io, "Quick start": a decorator, with `request` and `response` as arguments.
def fastapi_slowapi(limit: int) -> Any:
    """Build slowapi as a decorator, with its fields."""
    from fastapi import FastAPI, Request, Response
    from slowapi import Limiter, _rate_limit_exceeded_handler
    from slowapi.errors import RateLimitExceeded
    from slowapi.util import get_remote_address

    limiter = Limiter(key_func=get_remote_address, headers_enabled=True)
    app = FastAPI()
    app.state.limiter = limiter
    app.add_exception_handler(RateLimitExceeded, _rate_limit_exceeded_handler)

    async def home(request: Any, response: Any) -> dict[str, str]:
        return {"hello": "world"}

    home.__annotations__ |= {"request": Request, "response": Response}
    app.get("/")(limiter.limit(f"{limit}/hour")(home))
    return app


PEERS: dict[str, Build] = {"throttled-py": fastapi_throttled, "slowapi": fastapi_slowapi}
CONTENDERS: dict[str, Build] = {
    BARE: lambda limit: fastapi(),
    FLOOR: fastapi_floor,
    HEADGATE: fastapi_headgate,
    **PEERS,
}


# --- Measuring --------------------------------------------------------------------------------------------------------

SCOPE: dict[str, Any] = {
    "type": "http",
    "asgi": {"version": "3.0", "spec_version": "2.4"},
    "http_version": "1.1",
    "method": "GET",
    "scheme": "http",
    "path": "/",
    "raw_path": b"/",
    "query_string": b"",
    "root_path": "",
    "headers": [(b"host", b"service"), (b"accept", b"*/*"), (b"user-agent", b"benchmark")],
    "client": ("192.0.2.1", 1234),
    "server": ("service", 80),
}


async def send_asgi(app: Any, calls: int, statuses: list[int]) -> float:
    """Send requests, append their statuses to a list, and return CPU microseconds per request."""

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scopes = [{**SCOPE, "state": {}} for _ in range(calls)]
    start = time.thread_time_ns()
    for scope in scopes:
        await app(scope, receive, send)
    return (time.thread_time_ns() - start) / calls / 1000


def run(scale: Scale) -> Iterator[Section]:
    """Measure the CPU time that each contender adds to an admitted request."""
    announce("a limit in FastAPI")
    calls = scale.calls // 10
    with asyncio.Runner() as loop:

        def send(app: Any, calls: int) -> tuple[float, list[int]]:
            statuses: list[int] = []
            return loop.run(send_asgi(app, calls, statuses)), statuses

        def sample(app: Any) -> float:
            taken, statuses = send(app, calls)
            if set(statuses) != {200}:
                raise RuntimeError(f"the statuses are {set(statuses)}, but all requests should be admitted")
            return taken

        def prepare(item: tuple[str, Build]) -> Runner:
            name, build = item
            _, strict = send(build(1), 2)
            if name not in (BARE, FLOOR) and strict != [200, 429]:
                raise RuntimeError(f"the statuses are {strict}, but the second request should be refused")
            return partial(sample, build(PLENTY))

        builds = each({name: (name, build) for name, build in CONTENDERS.items()}, prepare)
        results = interleave(builds, 3 * scale.rounds)
    added = {name: result.over(results[BARE]) for name, result in results.items()}
    rows = [[name, number(result.median, 1)] for name, result in added.items() if name != BARE]
    shown = table("FastAPI: CPU microseconds that a limit adds to a request", ["", "admitted"], rows)
    best = min(PEERS, key=lambda name: added[name].median)
    times = added[best].median / added[HEADGATE].median
    target = Target(f"FastAPI: best peer ÷ {HEADGATE}", 1.0, times, at_most=False, where=best)
    yield Section("FastAPI", [shown, *notes(added)], {"admitted": added}, [target])


if __name__ == "__main__":
    main("http", __doc__, run)
