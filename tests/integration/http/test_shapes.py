"""At each edge, responses and fields match those of `Writer` and `refusal`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI
from starlette.responses import PlainTextResponse

from headgate import AsyncLimiter, Limiter, fixed_window, sliding_window, token_bucket
from headgate.http import Writer, by_address, by_header, refusal
from headgate.http.asgi import RateLimitMiddleware
from headgate.http.fastapi import install, limit
from headgate.http.wsgi import RateLimitMiddleware as WSGIRateLimitMiddleware
from headgate.policy import AsyncLivePolicy, LivePolicy
from headgate.testing import FakeClock
from tests.integration.http.clients import client_of, left, policies

START = 1_700_000_000.25
REALM: dict[str, Any] = {"user": by_address(), "realm": by_header("x-realm")}
TIERED = fixed_window("2/minute", tiers={"pro": "3/minute"})

SHAPES: dict[str, tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]] = {
    # Rules, options of the edge, and arguments of `Limiter.hit` for the same requests.
    "one rule": (("3/minute",), {}, {"key": "192.0.2.1"}),
    "token bucket": ((token_bucket("3/minute", burst=2),), {}, {"key": "192.0.2.1"}),
    "two rules": (("3/minute", "4/hour"), {}, {"key": "192.0.2.1"}),
    "never": (("0/minute", "4/hour"), {}, {"key": "192.0.2.1"}),
    "tier": ((TIERED,), {"tier": lambda _: "pro"}, {"key": "192.0.2.1", "tier": "pro"}),
    "unknown tier": ((TIERED,), {"tier": "other"}, {"key": "192.0.2.1", "tier": "other"}),
    "cost": (("5/minute",), {"cost": lambda _: 2}, {"key": "192.0.2.1", "cost": 2}),
    "by address as bytes": (("2/minute",), {"key": by_header("x-missing")}, {"key": b"192.0.2.1"}),
    "three scopes": (
        (
            sliding_window("9/minute", scope="user"),
            fixed_window("3/minute", scope="realm"),
            sliding_window("9/day", scope="*"),
        ),
        {"key": REALM},
        {"key": {"user": "192.0.2.1", "realm": "north"}},
    ),
    "no rules": ((), {}, {"key": "192.0.2.1"}),
}

Seen = list[tuple[int, dict[str, str], str]]


def plain_wsgi(environ: Any, start_response: Callable[..., Any]) -> Iterable[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain; charset=utf-8")])
    return [b"ok"]


def expected(rules: tuple[Any, ...], asked: dict[str, Any], times: int) -> Seen:
    """Return the responses that `Writer` and `refusal` make from the decisions of a limiter."""
    clock = FakeClock(START)
    limiter = Limiter(*rules, clock=clock)
    writer, seen = Writer(limiter.rules), []
    for _ in range(times):
        decision = limiter.hit(**asked)
        fields = dict(writer.fields(decision, clock.now_us(), asked.get("tier")))
        answer = None if decision else refusal(decision, writer.names, b"*/*")
        names = {name.decode(): value.decode() for name, value in fields.items()}
        seen.append((429 if answer else 200, names, answer.body.decode() if answer else "ok"))
        clock.advance(7)
    return seen


def seen_of(response: httpx.Response) -> tuple[int, dict[str, str], str]:
    fields = {name: value for name, value in response.headers.items() if "rate" in name or "retry" in name}
    return response.status_code, fields, response.text


async def seen_by(app: Any, clock: FakeClock, times: int) -> Seen:
    seen = []
    async with client_of(app) as client:
        for _ in range(times):
            seen.append(seen_of(await client.get("/", headers={"x-realm": "north"})))
            clock.advance(7)
    return seen


@pytest.mark.parametrize("shape", SHAPES)
async def test_asgi_response_matches_writer_and_refusal(shape: str) -> None:
    rules, arguments, asked = SHAPES[shape]
    clock = FakeClock(START)
    app = RateLimitMiddleware(PlainTextResponse("ok"), AsyncLimiter(*rules, clock=clock), **arguments)
    assert await seen_by(app, clock, 6) == expected(rules, asked, 6)


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
async def test_fastapi_response_matches_writer_and_refusal(shape: str, installed: bool) -> None:
    rules, arguments, asked = SHAPES[shape]
    clock = FakeClock(START)
    dependency = limit(AsyncLimiter(*rules, clock=clock), **arguments)
    app = FastAPI(dependencies=[Depends(dependency)], default_response_class=PlainTextResponse)
    if installed:
        install(app)

    @app.get("/")
    async def home() -> str:
        return "ok"

    assert await seen_by(app, clock, 6) == expected(rules, asked, 6)


@pytest.mark.parametrize("shape", SHAPES)
def test_wsgi_response_matches_writer_and_refusal(shape: str) -> None:
    rules, arguments, asked = SHAPES[shape]
    clock, seen = FakeClock(START), []
    app = WSGIRateLimitMiddleware(plain_wsgi, Limiter(*rules, clock=clock), **arguments)
    transport = httpx.WSGITransport(app, remote_addr="192.0.2.1")
    with httpx.Client(transport=transport, base_url="http://service") as client:
        for _ in range(6):
            seen.append(seen_of(client.get("/", headers={"x-realm": "north"})))
            clock.advance(7)
    assert seen == expected(rules, asked, 6)


# --- One version of a policy per request ------------------------------------------------------------------------------


ONE = '[limiters.api]\nrules = ["2/minute"]\n'
TWO = '[limiters.api]\nrules = ["3/minute", "9/hour"]\n'


def follow(path: Path, kind: Any) -> tuple[Any, Callable[[], None]]:
    """Return a limiter of a policy, and a function that activates the next policy."""
    file = path / "headgate.toml"
    file.write_text(ONE)
    live = kind.from_file(file, clock=FakeClock(START))

    def change() -> None:
        file.write_text(TWO)
        live.reload()

    return live["api"], change


async def test_policy_changed_during_the_key_function_decides_and_answers(tmp_path: Path) -> None:
    limiter, change = follow(tmp_path, AsyncLivePolicy)

    async def key(scope: Any) -> str:
        change()
        return "a"

    async with client_of(RateLimitMiddleware(PlainTextResponse("ok"), limiter, key=key)) as client:
        response = await client.get("/")
    assert policies(response) == {"per-minute": 3, "per-hour": 9}
    assert left(response) == {"per-minute": 2, "per-hour": 8}


def test_wsgi_shows_the_rules_that_decided(tmp_path: Path) -> None:
    limiter, change = follow(tmp_path, LivePolicy)

    def changing(environ: Any, start_response: Callable[..., Any]) -> Iterable[bytes]:
        change()
        return plain_wsgi(environ, start_response)

    app = WSGIRateLimitMiddleware(changing, limiter)
    with httpx.Client(transport=httpx.WSGITransport(app), base_url="http://service") as client:
        first, second = client.get("/"), client.get("/")
    assert (policies(first), left(first)) == ({"per-minute": 2}, {"per-minute": 1})
    assert left(second) == {"per-minute": 1, "per-hour": 8}


async def test_rules_changed_by_a_remote_store_appear_under_their_names() -> None:
    """A remote store may decide by other rules than the limiter was created with."""
    limiter, others = AsyncLimiter("2/minute"), AsyncLimiter("3/minute", "9/hour")
    app = RateLimitMiddleware(PlainTextResponse("ok"), limiter)
    limiter.gate = others.gate
    async with client_of(app) as client:
        responses = [await client.get("/") for _ in range(4)]
    assert left(responses[0]) == {"per-minute": 2, "per-hour": 8}
    assert responses[3].status_code == 429
    assert responses[3].json()["violated-policies"] == ["per-minute"]
