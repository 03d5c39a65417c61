"""HTTP edges with limiters of a policy file: they send the fields it chooses, and follow its changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI, Response
from starlette.responses import PlainTextResponse

from headgate import ConfigError
from headgate.http import Headers, Writer
from headgate.http.asgi import RateLimitMiddleware
from headgate.http.fastapi import install, limit
from headgate.http.testing import fresh_limits, limits_off
from headgate.http.wsgi import RateLimitMiddleware as WSGIRateLimitMiddleware
from headgate.policy import AsyncLivePolicy, LivePolicy
from headgate.testing import FakeClock
from tests.integration.http.clients import client_of, is_complete, left, policies

ONE = '[limiters.api]\nrules = ["{}"]\n'
TIERS = """
[limiters.api]
rules = [{ quota = "2/minute", name = "r", tiers = { free = "3/minute", pro = "5/minute" } }]
default_tier = "free"
[[limiters.api.overrides]]
key = "192.0.2.9"
rules = { r = "7/minute" }
"""
X_RATELIMIT = {"x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"}
IETF = {"ratelimit", "ratelimit-policy"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "headgate.toml"


def asgi(live: Any, **arguments: Any) -> Any:
    return RateLimitMiddleware(PlainTextResponse("ok"), live["api"], **arguments)


def fast(live: Any, **arguments: Any) -> Any:
    app = FastAPI(dependencies=[Depends(limit(live["api"], **arguments))])
    install(app)

    @app.get("/")
    async def home(status: int = 200) -> Response:
        return PlainTextResponse("ok", status)

    return app


@pytest.fixture(params=[asgi, fast])
def edge(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Both edges for coroutines."""
    made: Callable[..., Any] = request.param
    return made


def rewrite(file: Path, text: str) -> None:
    file.write_text(text)


def follow(file: Path, text: str, **arguments: Any) -> AsyncLivePolicy:
    file.write_text(text)
    return AsyncLivePolicy.from_file(file, clock=FakeClock(), **arguments)


def rate_limit_fields(response: httpx.Response) -> set[str]:
    return {name for name in response.headers if "ratelimit" in name}


# --- Coroutines ----------------------------------------------------------------------------------------------------------


async def test_edge_uses_a_policy_limiter_and_follows_reloads(file: Path, edge: Callable[..., Any]) -> None:
    live = follow(file, ONE.format("2/minute"))
    async with client_of(edge(live)) as client:
        codes = [(await client.get("/")).status_code for _ in range(3)]
        assert codes == [200, 200, 429]
        rewrite(file, ONE.format("4/minute"))
        live.reload()
        response = await client.get("/")
        assert response.status_code == 200
        assert is_complete(response)
        assert left(response) == {"per-minute": 1}
        assert policies(response) == {"per-minute": 4}
        assert response.headers["x-ratelimit-limit"] == "4"
        rewrite(file, ONE.format("4/minute").replace('"]', '", "9/hour"]'))
        live.reload()
        response = await client.get("/")
        assert left(response) == {"per-minute": 0, "per-hour": 8}


@pytest.mark.parametrize(
    ("style", "written"),
    [("both", IETF | X_RATELIMIT), ("ietf", IETF), ("x-ratelimit", X_RATELIMIT), ("none", set())],
)
async def test_policy_chooses_the_fields(
    file: Path, edge: Callable[..., Any], style: str, written: set[str]
) -> None:
    live = follow(file, ONE.format("1/minute") + f'headers = "{style}"')
    async with client_of(edge(live)) as client:
        assert rate_limit_fields(await client.get("/")) == written
        refused = await client.get("/")
        assert rate_limit_fields(refused) == written
        assert "retry-after" in refused.headers
        rewrite(file, ONE.format("5/minute") + 'headers = "ietf"')
        live.reload()
        assert rate_limit_fields(await client.get("/")) == IETF
    for given in ("x-ratelimit", Headers(ratelimit=None)):
        async with client_of(edge(live, headers=given)) as client:
            assert rate_limit_fields(await client.get("/")) == X_RATELIMIT, "unless they are given"


async def test_tiers_and_overrides_appear_in_the_fields(file: Path, edge: Callable[..., Any]) -> None:
    app = edge(follow(file, TIERS), tier=lambda _: "pro")
    async with client_of(app) as client:
        response = await client.get("/")
    assert (policies(response), left(response)) == ({"r": 5}, {"r": 4})
    app = edge(follow(file, TIERS))
    async with client_of(app) as client:
        response = await client.get("/")
    assert (policies(response), left(response)) == ({"r": 3}, {"r": 2})
    async with client_of(app, "192.0.2.9") as client:
        response = await client.get("/")
    assert (policies(response), left(response)) == ({"r": 7}, {"r": 6})


async def test_cost_above_a_lowered_limit_is_413_and_not_500(file: Path, edge: Callable[..., Any]) -> None:
    live = follow(file, ONE.format("9/minute"))
    app = edge(live, cost=3)
    async with client_of(app) as client:
        assert (await client.get("/")).status_code == 200
        rewrite(file, ONE.format("2/minute"))
        live.reload()
        assert (await client.get("/")).status_code == 413
    with pytest.raises(ConfigError, match="every request costs 3"):
        edge(live, cost=3)


async def test_fixed_cost_is_not_checked_against_a_changeable_limit(file: Path) -> None:
    app = asgi(follow(file, TIERS), cost=3)
    async with client_of(app) as client:
        assert (await client.get("/")).status_code == 200


async def test_outcomes_are_counted_by_the_policy_of_the_request(file: Path) -> None:
    live = follow(file, ONE.format("1/minute"))
    async with client_of(fast(live, count={401})) as client:
        assert [(await client.get("/")).status_code for _ in range(3)] == [200] * 3
        assert (await client.get("/?status=401")).status_code == 401
        assert (await client.get("/")).status_code == 429


async def test_policy_change_during_a_decision_breaks_no_response(file: Path) -> None:
    """The response uses the rules of the decision, even if there are more rules now."""
    live = follow(file, ONE.format("5/minute"))
    app = asgi(live, cost=lambda _: 1)
    version: Any = live["api"].current
    decide = version.gate.decide

    async def reloading(request: Any) -> Any:
        answer = await decide(request)
        rewrite(file, ONE.format("5/minute").replace('"]', '", "9/hour"]'))
        live.reload()
        return answer

    version.gate = SimpleNamespace(decide=reloading)
    async with client_of(app) as client:
        response = await client.get("/")
        assert (response.status_code, left(response)) == (200, {"per-minute": 4})
        response = await client.get("/")
        assert left(response) == {"per-minute": 3, "per-hour": 8}


async def test_edge_created_during_a_reload_uses_the_newer_policy(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = follow(file, ONE.format("1/minute"))

    def reloading(*args: Any) -> Writer:
        """Create the writer of the old rules too late: another thread has already loaded new ones."""
        monkeypatch.undo()
        writer = Writer(*args)
        rewrite(file, ONE.format("2/minute"))
        live.reload()
        return writer

    monkeypatch.setattr("headgate.http.limit.Writer", reloading)
    async with client_of(asgi(live)) as client:
        assert policies(await client.get("/")) == {"per-minute": 2}


async def test_fresh_limits_work_with_a_policy(file: Path, edge: Callable[..., Any]) -> None:
    live = follow(file, ONE.format("1/minute"))
    app = edge(live)
    async with client_of(app) as client:
        assert (await client.get("/")).status_code == 200
        with fresh_limits():
            assert [(await client.get("/")).status_code for _ in range(2)] == [200, 429]
            rewrite(file, ONE.format("2/minute"))
            live.reload()
            assert [(await client.get("/")).status_code for _ in range(3)] == [200, 200, 429]
        with limits_off():
            assert [(await client.get("/")).status_code for _ in range(3)] == [200] * 3
        assert [(await client.get("/")).status_code for _ in range(2)] == [200, 429]


async def test_the_openapi_document_has_the_fields_of_the_policy(file: Path) -> None:
    app = fast(follow(file, ONE.format("1/minute") + 'headers = "ietf"'))
    headers = app.openapi()["paths"]["/"]["get"]["responses"]["429"]["headers"]
    assert set(headers) == {"Retry-After", "RateLimit-Policy", "RateLimit"}


def test_limiter_does_not_keep_a_deleted_edge(file: Path) -> None:
    live = follow(file, ONE.format("1/minute"))
    for _ in range(3):
        asgi(live)
    asgi(live)
    assert len(live["api"]._listeners) <= 2


async def test_policy_changed_during_the_key_function_decides_and_answers(file: Path) -> None:
    live = follow(file, ONE.format("2/minute"))

    async def key(scope: Any) -> str:
        rewrite(file, ONE.format("3/minute").replace('"]', '", "9/hour"]'))
        live.reload()
        return "a"

    async with client_of(asgi(live, key=key)) as client:
        response = await client.get("/")
    assert policies(response) == {"per-minute": 3, "per-hour": 9}
    assert left(response) == {"per-minute": 2, "per-hour": 8}


# --- Threads -------------------------------------------------------------------------------------------------------------


def echo(environ: Any, start_response: Callable[..., Any]) -> Iterable[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"body"]


def wsgi_client(app: Any, address: str = "192.0.2.1") -> httpx.Client:
    return httpx.Client(transport=httpx.WSGITransport(app, remote_addr=address), base_url="http://service")


def test_wsgi_uses_a_policy_limiter_and_follows_reloads(file: Path) -> None:
    file.write_text(ONE.format("2/minute") + 'headers = "x-ratelimit"')
    live = LivePolicy.from_file(file, clock=FakeClock())
    with wsgi_client(WSGIRateLimitMiddleware(echo, live["api"])) as client:
        responses = [client.get("/") for _ in range(3)]
        assert [response.status_code for response in responses] == [200, 200, 429]
        assert rate_limit_fields(responses[0]) == X_RATELIMIT
        rewrite(file, TIERS)
        live.reload()
        response = client.get("/")
        assert (policies(response), left(response)) == ({"r": 3}, {"r": 2}), (
            "another rule, that of its default tier"
        )
    with wsgi_client(WSGIRateLimitMiddleware(echo, live["api"]), "192.0.2.9") as client:
        assert policies(client.get("/")) == {"r": 7}


def test_wsgi_shows_the_rules_that_decided(file: Path) -> None:
    file.write_text(ONE.format("2/minute"))
    live = LivePolicy.from_file(file, clock=FakeClock())

    def changing(environ: Any, start_response: Callable[..., Any]) -> Iterable[bytes]:
        rewrite(file, ONE.format("3/minute").replace('"]', '", "9/hour"]'))
        live.reload()
        return echo(environ, start_response)

    with wsgi_client(WSGIRateLimitMiddleware(changing, live["api"])) as client:
        first, second = client.get("/"), client.get("/")
    assert (policies(first), left(first)) == ({"per-minute": 2}, {"per-minute": 1})
    assert left(second) == {"per-minute": 1, "per-hour": 8}
