"""`python -m benchmarks.http [--quick]`: what a limit adds to one request, in this process.

First each shape of our own limiters around the least ASGI application, and as a FastAPI dependency, with all header fields;
then one limit beside its peers, on Starlette and on FastAPI.

Every peer is set up for memory as its own documentation says; the address is above each. A request is a call of the ASGI
application without a server or a client, so that nothing but the application and the limit is timed. Costs are those over
the same application without a limit, as the median of the differences within each round; refused requests never reach the
endpoint, so theirs can be less than nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contenders import HEADGATE
from benchmarks.harness import (
    FULL,
    QUICK,
    Panel,
    Progress,
    Result,
    Runner,
    Scale,
    Section,
    Target,
    each,
    interleave,
    notes,
    number,
    table,
    target_table,
    write_chart,
    write_json,
)

STEPS = 4

BARE = "no limit"
STARLETTE_FLOOR = "floor: inlined, three fields"
FASTAPI_FLOOR = "floor: empty dependency"
ONE_RULE, TWO_RULES = "one rule", "two rules"
PEERS = ("traffik", "slowapi", "throttled-py")
PLENTY = 1_000_000_000

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
    "headers": [
        (b"host", b"service"),
        (b"accept", b"*/*"),
        (b"user-agent", b"benchmark"),
        (b"x-realm", b"north"),
    ],
    "client": ("192.0.2.1", 1234),
    "server": ("service", 80),
}

Build = Callable[[int], Any]
"""Returns an application that admits so many requests per hour."""


# --- Shapes of our own limiters ---------------------------------------------------------------------------------------

PAGE = [(b"content-type", b"text/plain"), (b"content-length", b"5")]


async def page(scope: Any, receive: Any, send: Any) -> None:
    """Answer as an ASGI application does that has nothing to do."""
    await send({"type": "http.response.start", "status": 200, "headers": PAGE})
    await send({"type": "http.response.body", "body": b"hello"})


def shape(name: str) -> tuple[Any, dict[str, Any]]:
    """Return a limiter of this shape, and what an edge is told besides."""
    from headgate import AsyncLimiter, sliding_window, token_bucket
    from headgate.http import by_address, by_header

    hour, minute, day = (f"{PLENTY}/{period}" for period in ("hour", "minute", "day"))
    scoped = [
        sliding_window(quota, scope=scope) for quota, scope in ((hour, "user"), (minute, "realm"), (day, "*"))
    ]
    by_scope = {"user": by_address(), "realm": by_header("x-realm")}
    tiered = sliding_window("5/hour", tiers={"pro": hour})
    shapes: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
        ONE_RULE: lambda: (AsyncLimiter(hour), {}),
        "one token bucket": lambda: (AsyncLimiter(token_bucket(hour)), {}),
        TWO_RULES: lambda: (AsyncLimiter(hour, minute), {}),
        "three rules, three scopes": lambda: (AsyncLimiter(*scoped), {"key": by_scope}),
        "tier": lambda: (AsyncLimiter(tiered), {"tier": "pro"}),
        "refused, one rule": lambda: (AsyncLimiter("1/hour"), {}),
        "refused, two rules": lambda: (AsyncLimiter("1/hour", "1/minute"), {}),
        "policy file": lambda: (of_policy(f'"{hour}"'), {}),
        "policy file, shadow rule": lambda: (
            of_policy(f'"{hour}", {{ quota = "{minute}", shadow = true }}'),
            {},
        ),
    }
    return shapes[name]()


SHAPES = (
    ONE_RULE,
    "one token bucket",
    TWO_RULES,
    "three rules, three scopes",
    "tier",
    "refused, one rule",
    "refused, two rules",
    "policy file",
    "policy file, shadow rule",
)


def of_policy(rules: str) -> Any:
    """Return the limiter of a policy file with these rules; the policy lives as long as the process."""
    from headgate.policy import AsyncLivePolicy

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "headgate.toml"
        file.write_text(f"[limiters.api]\nrules = [{rules}]\n")
        _POLICIES.append(AsyncLivePolicy.from_file(file))
    return _POLICIES[-1]["api"]


_POLICIES: list[Any] = []


def asgi_shape(name: str) -> Any:
    """Build the least ASGI application with a limit around it."""
    from headgate.http.asgi import RateLimitMiddleware

    limiter, arguments = shape(name)
    return RateLimitMiddleware(page, limiter, **arguments)


def fastapi_shape(name: str) -> Any:
    """Build a FastAPI application with a limit as a dependency."""
    from headgate.http.fastapi import install
    from headgate.http.fastapi import limit as limit_to

    limiter, arguments = shape(name)
    app = fastapi(limit_to(limiter, **arguments))
    install(app)
    return app


def measure_shapes(
    bare: Any,
    floor: tuple[str, Any],
    build: Callable[[str], Any],
    scale: Scale,
    calls: int,
    progress: Progress,
) -> dict[str, Result]:
    """Return what each shape adds to a request, over the application without a limit."""
    with asyncio.Runner() as loop:
        apps = {BARE: bare, floor[0]: floor[1], **{name: build(name) for name in SHAPES}}

        def runner(app: Any) -> Runner:
            loop.run(time_requests(app, 100))
            return lambda: loop.run(time_requests(app, calls))

        results = interleave({name: runner(app) for name, app in apps.items()}, scale.rounds, progress)
    return {name: over(result, results[BARE]) for name, result in results.items() if name != BARE}


def shape_section(title: str, found: dict[str, Result], floor: str, bounds: Mapping[str, float]) -> Section:
    """Return the table of all shapes, and what was promised: so many times what the floor adds."""
    times = {name: result.times(found[floor]) for name, result in found.items()}
    rows = [[name, number(result.median, 1), number(times[name], 1)] for name, result in found.items()]
    text = [
        table(
            f"{title}: what each shape of limiter adds to a request", ["shape", "µs", "times the floor"], rows
        )
    ]
    pace = f"floor {number(found[floor].median, 1)} µs"
    promised = [
        Target(f"{title}: {name}, times the floor", bound, times[name], at_most=True, where=pace)
        for name, bound in bounds.items()
    ]
    return Section(f"{title} shapes", [*text, *notes([found])], {"added": found}, promised, [])


# --- Starlette --------------------------------------------------------------------------------------------------------


def starlette(**arguments: Any) -> Any:
    """Build the application without a limit."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    async def home(request: Request) -> PlainTextResponse:
        return PlainTextResponse("hello")

    return Starlette(routes=[Route("/", home)], **arguments)


def starlette_bare(limit: int) -> Any:
    """Build the application without a limit."""
    return starlette()


def starlette_floor(limit: int) -> Any:
    """Build the least Python that limits an application and writes three fields."""
    return inlined(starlette(), limit)


def inlined(app: Any, limit: int) -> Any:
    """Return the application with the least Python around it that limits it and writes three fields."""
    emission = 3600 / limit
    full_at: dict[str, float] = {}

    async def limited(scope: Any, receive: Any, send: Any) -> None:
        now = time.monotonic()
        at = max(full_at.get(scope["client"][0], now), now) + emission
        left = int((3600 - at + now) // emission)
        if left < 0:
            await send({"type": "http.response.start", "status": 429, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        full_at[scope["client"][0]] = at

        async def send_with_fields(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    (b"x-ratelimit-limit", b"%d" % limit),
                    (b"x-ratelimit-remaining", b"%d" % left),
                    (b"x-ratelimit-reset", b"%d" % (at - now)),
                ]
            await send(message)

        await app(scope, receive, send_with_fields)

    return limited


def starlette_headgate(limit: int, kind: str = "sliding_window") -> Any:
    """Build ours, with all fields; text like "5/hour" means a sliding window."""
    import headgate
    from headgate.http.asgi import RateLimitMiddleware

    return RateLimitMiddleware(starlette(), getattr(headgate, kind)(f"{limit}/hour"))


# https://pypi.org/project/traffik: a backend with its lifespan, ThrottleMiddleware, HTTPThrottle; no fields by default.
def starlette_traffik(limit: int) -> Any:
    """Build traffik as a middleware."""
    from starlette.middleware import Middleware
    from traffik import HTTPThrottle
    from traffik.backends.inmemory import InMemoryBackend
    from traffik.middleware import ThrottleMiddleware

    backend = InMemoryBackend(namespace=f"starlette-{limit}")
    throttle = HTTPThrottle(f"starlette-{limit}", rate=f"{limit}/hour")
    app = starlette(
        middleware=[Middleware(ThrottleMiddleware, middleware_throttles=[throttle], backend=backend)]
    )
    return Initialised(app, backend)


# https://slowapi.readthedocs.io: default_limits with the ASGI middleware; fields are off unless asked for.
def starlette_slowapi(limit: int) -> Any:
    """Build slowapi as a middleware, with its fields."""
    from slowapi import Limiter
    from slowapi.middleware import SlowAPIASGIMiddleware
    from slowapi.util import get_remote_address
    from starlette.middleware import Middleware

    app = starlette(middleware=[Middleware(SlowAPIASGIMiddleware)])
    app.state.limiter = Limiter(
        key_func=get_remote_address, default_limits=[f"{limit}/hour"], headers_enabled=True
    )
    return app


# --- FastAPI ----------------------------------------------------------------------------------------------------------


def fastapi(dependency: Any = None) -> Any:
    """Build the application, its route with a dependency."""
    from fastapi import Depends, FastAPI

    app = FastAPI()

    @app.get("/", dependencies=[Depends(dependency)] if dependency else [])
    async def home() -> dict[str, str]:
        return {"hello": "world"}

    return app


def fastapi_bare(limit: int) -> Any:
    """Build the application without a limit."""
    return fastapi()


def fastapi_floor(limit: int) -> Any:
    """Build the application with a dependency that does nothing."""

    async def nothing() -> None: ...

    return fastapi(nothing)


def fastapi_headgate(limit: int, kind: str = "sliding_window") -> Any:
    """Build ours, with all fields on every response; text like "5/hour" means a sliding window."""
    import headgate
    from headgate.http.fastapi import install
    from headgate.http.fastapi import limit as limit_to

    app = fastapi(limit_to(getattr(headgate, kind)(f"{limit}/hour")))
    install(app)
    return app


def fastapi_middleware(limit: int) -> Any:
    """Build ours around the whole application, where FastAPI has no dependency to solve."""
    from headgate.http.asgi import RateLimitMiddleware

    return RateLimitMiddleware(fastapi(), f"{limit}/hour")


# https://pypi.org/project/traffik, "Quickstart": Depends(throttle).
def fastapi_traffik(limit: int) -> Any:
    """Build traffik as a dependency."""
    from traffik import HTTPThrottle
    from traffik.backends.inmemory import InMemoryBackend

    backend = InMemoryBackend(namespace=f"fastapi-{limit}")
    throttle = HTTPThrottle(f"fastapi-{limit}", rate=f"{limit}/hour", backend=backend)
    return Initialised(fastapi(throttle), backend)


# https://throttled-py.readthedocs.io: it has nothing for FastAPI; this is the dependency that one would write.
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

    limited.__annotations__["request"] = Request  # FastAPI would look for the name in this module
    return fastapi(limited)


# https://slowapi.readthedocs.io, "Quick start": a decorator, `request` and `response` among the arguments.
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


STARLETTE: dict[str, Build] = {
    BARE: starlette_bare,
    STARLETTE_FLOOR: starlette_floor,
    HEADGATE: starlette_headgate,
    f"{HEADGATE}, token bucket": partial(starlette_headgate, kind="token_bucket"),
    "traffik": starlette_traffik,
    "slowapi": starlette_slowapi,
}
FASTAPI: dict[str, Build] = {
    BARE: fastapi_bare,
    FASTAPI_FLOOR: fastapi_floor,
    HEADGATE: fastapi_headgate,
    f"{HEADGATE}, token bucket": partial(fastapi_headgate, kind="token_bucket"),
    f"{HEADGATE}, ASGI middleware": fastapi_middleware,
    "traffik": fastapi_traffik,
    "throttled-py": fastapi_throttled,
    "slowapi": fastapi_slowapi,
}
UNLIMITED = (BARE, FASTAPI_FLOOR)


class Initialised:
    """An application whose backend is made ready by the first request, for want of a server that runs its lifespan."""

    def __init__(self, app: Any, backend: Any) -> None:
        self.app, self.backend, self.is_ready = app, backend, False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if not self.is_ready:
            await self.backend.initialize()
            self.is_ready = True
        await self.app(scope, receive, send)


# --- Measuring --------------------------------------------------------------------------------------------------------


async def _receive() -> Any:
    return {"type": "http.request", "body": b"", "more_body": False}


async def status_of(app: Any) -> int:
    """Return the status that a request gets."""
    statuses = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app({**SCOPE, "state": {}}, _receive, send)
    return int(statuses[0])


async def time_requests(app: Any, calls: int) -> float:
    """Return CPU microseconds per request."""

    async def send(message: Any) -> None: ...

    scopes = [{**SCOPE, "state": {}} for _ in range(calls)]
    start = time.thread_time_ns()
    for scope in scopes:
        await app(scope, _receive, send)
    return (time.thread_time_ns() - start) / calls / 1000


def runners_of(
    builds: Mapping[str, Build], loop: asyncio.Runner, calls: int, *, refused: bool
) -> dict[str, Runner | Result]:
    """Build every contender, see it admit or refuse, and return what times it."""
    chosen = {name: build for name, build in builds.items() if not (refused and name in UNLIMITED)}

    def build_and_check(build: Build) -> Runner:
        app = build(1 if refused else PLENTY)
        seen = [loop.run(status_of(app)) for _ in range(3)]
        if build not in (starlette_bare, fastapi_bare) and seen != [200, 429 if refused else 200, seen[1]]:
            raise RuntimeError(f"answered {seen}")
        return lambda: loop.run(time_requests(app, calls))

    return each(chosen, build_and_check)


def over(result: Result, base: Result) -> Result:
    """Return what a contender costs over another one, per round."""
    if result.trouble or not base.samples:
        return result
    return Result([mine - its for mine, its in zip(result.samples, base.samples, strict=True)])


def measure(
    builds: Mapping[str, Build], scale: Scale, calls: int, progress: Progress
) -> tuple[dict[str, Result], dict[str, Result]]:
    """Return what each contender adds to a request that is admitted, and to one that is refused."""
    with asyncio.Runner() as loop:
        admitted = runners_of(builds, loop, calls, refused=False)
        refused = runners_of(builds, loop, calls, refused=True)
        # In the same rounds, since one is compared with the other.
        turns = {**admitted, **{f"{name}, refused": runner for name, runner in refused.items()}}
        results = interleave(turns, scale.rounds, progress)
    added = {name: over(result, results[BARE]) for name, result in results.items()}
    return {name: added[name] for name in admitted}, {name: added[f"{name}, refused"] for name in refused}


def section(name: str, admitted: dict[str, Result], refused: dict[str, Result], floor: str) -> Section:
    """Return the table of one framework, and what was promised for it."""
    rows = [
        [contender, number(result.median, 1), number(refused.get(contender, Result()).median, 1)]
        for contender, result in admitted.items()
        if contender != BARE
    ]
    title = f"{name}: microseconds that a limit adds to a request"
    text = [table(title, ["contender", "admitted", "refused"], rows), *notes([admitted, refused])]
    bars = [
        (contender, result.median, f"{number(result.median, 1)}")
        for contender, result in admitted.items()
        if contender != BARE
    ]
    data = {"admitted": admitted, "refused": refused}
    return Section(name, text, data, targets(name, admitted, refused, floor), [Panel(title, "µs", bars)])


def targets(name: str, admitted: dict[str, Result], refused: dict[str, Result], floor: str) -> list[Target]:
    """Return what was promised, on a machine where the floors took 2 and 17 microseconds; see what they take here."""
    ours = admitted[HEADGATE]
    pace = f"floor {number(admitted[floor].median, 1)}"
    saved = [less - more for less, more in zip(refused[HEADGATE].samples, ours.samples, strict=True)]
    found = [Target(f"{name}: refused beyond admitted, µs", 0, statistics.median(saved), at_most=True)]
    if floor == FASTAPI_FLOOR:
        cost = over(ours, admitted[floor]).median
        return [Target(f"{name}: beyond an empty dependency, µs", 12, cost, at_most=True, where=pace), *found]
    peers = {peer: admitted[peer].median for peer in PEERS if peer in admitted and admitted[peer].samples}
    best = min(peers, key=lambda peer: peers[peer], default="")
    times = peers.get(best, float("nan")) / ours.median
    return [
        Target(f"{name}: beyond no limit, µs", 6, ours.median, at_most=True, where=pace),
        # Not 3: the best peer writes no fields. Ours are a fifth of what we add; without them it would be 3 times less.
        Target(f"{name}: times less than the best peer", 2, times, at_most=False, where=best),
        *found,
    ]


def run(scale: Scale, progress: Progress) -> Iterator[Section]:
    """Measure every shape of ours, then both frameworks with the peers."""
    progress.begin("shapes around an ASGI application")
    floor: tuple[str, Any] = STARLETTE_FLOOR, inlined(page, PLENTY)
    found = measure_shapes(page, floor, asgi_shape, scale, scale.calls // 5, progress)
    # 6 and 8 microseconds on a machine where the floor takes 2.
    yield shape_section("ASGI", found, STARLETTE_FLOOR, {ONE_RULE: 3, TWO_RULES: 4, "policy file": 3})
    progress.begin("shapes as a FastAPI dependency")
    floor = FASTAPI_FLOOR, fastapi_floor(PLENTY)
    found = measure_shapes(fastapi_bare(PLENTY), floor, fastapi_shape, scale, scale.calls // 10, progress)
    yield shape_section("FastAPI", found, FASTAPI_FLOOR, {})
    progress.begin("a limit on Starlette")
    yield section("Starlette", *measure(STARLETTE, scale, scale.calls // 5, progress), STARLETTE_FLOOR)
    progress.begin("a limit on FastAPI")
    yield section("FastAPI", *measure(FASTAPI, scale, scale.calls // 10, progress), FASTAPI_FLOOR)


def main() -> None:
    """Print tables and targets; write JSON and a chart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a rough look: fewer calls and rounds")
    options = parser.parse_args()
    progress = Progress(STEPS)
    sections: list[Section] = []
    for found in run(QUICK if options.quick else FULL, progress):
        progress.end()
        print(*found.tables, sep="\n", flush=True)
        sections.append(found)
    promised = [target for found in sections for target in found.targets]
    print(target_table(promised, "Targets"))
    written = write_json("http", {**{found.name: found.data for found in sections}, "targets": promised})
    panels = [panel for found in sections for panel in found.panels]
    chart = write_chart("http", "What a limit adds to a request (less is better)", panels, HEADGATE)
    print(f"\n{written}\n{chart}", file=sys.stderr)


if __name__ == "__main__":
    main()
