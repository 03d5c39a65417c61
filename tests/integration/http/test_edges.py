"""Promises that hold at every edge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from headgate import (
    Limiter,
    MemoryStore,
    StoreUnavailable,
    concurrent,
    fixed_window,
    sliding_window,
    token_bucket,
)
from headgate.http import Writer, by_address, by_header, refusal
from headgate.stores import Gate
from headgate.testing import FakeClock
from tests.integration.http.clients import ADDRESS, is_complete, left, policies
from tests.integration.http.edges import EDGES, App, Edge


@pytest.fixture(params=EDGES)
def edge(request: pytest.FixtureRequest) -> Edge:
    return EDGES[request.param]


def header(name: str, default: Any = None) -> Callable[[Any], Any]:
    """Return a function of the request, or of its scope, that returns a header field."""

    def get(request: Any) -> Any:
        if isinstance(request, dict):
            return dict(request["headers"]).get(name.encode(), b"").decode() or default
        return request.headers.get(name, default)

    return get


class Unrefunding(MemoryStore):
    """A store that fails on refunds."""

    def bind(self, *arguments: Any, **options: Any) -> Any:
        return UnrefundingGate(super().bind(*arguments, **options))

    def bind_async(self, *arguments: Any, **options: Any) -> Any:
        return AsyncUnrefundingGate(super().bind(*arguments, **options))


class UnrefundingGate:
    def __init__(self, gate: Gate) -> None:
        self.decide = gate.decide

    def refund(self, *arguments: Any) -> None:
        raise StoreUnavailable("gone")


class AsyncUnrefundingGate:
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def decide(self, request: Any) -> Any:
        return self._gate.decide(request)

    async def refund(self, *arguments: Any) -> None:
        raise StoreUnavailable("gone")


async def codes(client: httpx.AsyncClient, *paths: str, **fields: str) -> list[int]:
    sent = {name.replace("_", "-"): value for name, value in fields.items()}
    return [(await client.get(path, headers=sent)).status_code for path in paths]


async def test_every_response_has_the_fields(edge: Edge) -> None:
    wanted = {"/": 200, "/status/403": 403, "/status/204": 204, "/stream": 200}
    if edge.sees_errors:
        wanted["/broken"] = 500
    if edge.is_whole:
        wanted["/nowhere"] = 404
    async with edge.serve(App(), ["9/minute"]) as client:
        responses = [await client.get(path) for path in wanted]
    assert [response.status_code for response in responses] == list(wanted.values())
    assert all(map(is_complete, responses))
    assert not any("retry-after" in response.headers for response in responses)
    assert left(responses[-1]) == {"per-minute": 9 - len(wanted)}


async def test_refused_request_gets_problem_json_and_skips_the_application(edge: Edge) -> None:
    app = App()
    async with edge.serve(app, ["2/minute"]) as client:
        assert await codes(client, "/", "/") == [200, 200]
        refused = await client.get("/")
        text = await client.get("/", headers={"accept": "text/plain"})
    assert app.reached == 2
    assert refused.status_code == 429
    assert is_complete(refused)
    if edge.has_problems:
        assert refused.headers["content-type"] == "application/problem+json"
        assert refused.json()["violated-policies"] == ["per-minute"]
        assert refused.json()["retry_after"] == int(refused.headers["retry-after"])
        assert text.text.startswith("Too many requests.")
    else:
        assert "throttled" in refused.json()["detail"]


async def test_functions_take_the_request(edge: Edge) -> None:
    limiter = edge.kind(sliding_window("5/minute", tiers={"pro": "50/minute"}))
    options = {
        "key": by_header("x-user"),
        "cost": lambda request: int(header("x-cost")(request) or 1),
        "tier": header("x-tier"),
        "quota": header("x-quota"),
        "quota_for": 0,
        "exempt": lambda request: header("x-exempt")(request) == "yes",
    }
    async with edge.serve(App(), [limiter], **options) as client:

        async def get(**fields: str) -> httpx.Response:
            return await client.get("/", headers={f"x-{name}": value for name, value in fields.items()})

        assert left(await get(user="a", cost="3")) == {"per-minute": 2}
        assert left(await get(user="b", cost="3")) == {"per-minute": 2}
        assert (await get(user="a", cost="3")).status_code == 429
        assert left(await get(user=ADDRESS)) == {"per-minute": 4}
        assert left(await get()) == {"per-minute": 4}, "the address is not the key of a user with its name"
        pro = await get(user="c", tier="pro", cost="20")
        assert (policies(pro), left(pro)) == ({"per-minute": 50}, {"per-minute": 30})
        assert policies(await get(user="d", quota="7/minute", cost="6")) == {"per-minute": 7}
        assert (await get(user="d", cost="6")).status_code == 413
        assert (await get(user="d", tier="pro", cost="51")).status_code == 413
        exempt = await get(user="a", exempt="yes")
        assert (exempt.status_code, "ratelimit" in exempt.headers) == (200, False)


async def test_scopes_are_charged_together_or_not_at_all(edge: Edge) -> None:
    limiter = edge.kind(sliding_window("9/minute", scope="user"), sliding_window("1/minute", scope="realm"))
    keys = {"user": by_address(), "realm": header("x-realm")}
    async with edge.serve(App(), [limiter], key=keys) as client:
        realms = [await client.get("/", headers={"x-realm": realm}) for realm in ("north", "north", "south")]
    assert [response.status_code for response in realms] == [200, 429, 200]
    assert left(realms[2])["per-minute-user"] == 7


async def test_behind_a_proxy_the_client_is_limited_not_the_proxy(edge: Edge) -> None:
    address = by_address(proxies=["192.0.2.0/24", "127.0.0.1"])
    async with edge.serve(App(), ["1/minute"], address=address) as client:
        for forwarded in ("198.51.100.1", "6.6.6.6, 198.51.100.2"):
            assert await codes(client, "/", "/", x_forwarded_for=forwarded) == [200, 429]
        assert await codes(client, "/", x_forwarded_for="7.7.7.7, 198.51.100.2") == [429]


async def test_only_chosen_outcomes_count(edge: Edge) -> None:
    async with edge.serve(App(), ["2/minute"], count={401}) as client:
        responses = [await client.get(path) for path in ("/", "/status/403", "/status/401", "/")]
        assert await codes(client, "/broken") == [500]
        assert await codes(client, "/status/401", "/") == [401, 429]
    assert [left(response)["per-minute"] for response in responses] == [2, 2, 1, 1]


async def test_failed_refund_does_not_fail_the_response(edge: Edge, caplog: pytest.LogCaptureFixture) -> None:
    limiter = edge.kind("5/minute", name="x", store=Unrefunding())
    async with edge.serve(App(), [limiter], count={401}) as client:
        assert await codes(client, "/") == [200]
    assert "could not be given back" in caplog.text


async def test_places_are_held_until_the_response_ends(edge: Edge) -> None:
    rule, store, seen = concurrent(1, lease="1m"), MemoryStore(), []
    places = Limiter(rule, name="places", store=store)
    app = App(while_streaming=lambda: seen.append(bool(places.check("k"))))
    limiter = edge.kind(rule, name="places", store=store)
    async with edge.serve(app, [limiter], key=lambda request: "k") as client:
        for path in ("/stream", "/", "/broken", "/stream"):
            await codes(client, path)
            assert places.check("k"), path
    assert seen == [False, False]


async def test_a_raised_refusal_is_answered(edge: Edge) -> None:
    async with edge.serve(App(), ["9/minute"]) as client:
        assert await codes(client, "/raised") == [200]
        refused = await client.get("/raised")
        assert await codes(client, "/raised", x_cost="2") == [413]
    assert refused.status_code == 429
    assert is_complete(refused)
    assert left(refused) == {"per-minute": 7, "per-hour": 0}
    assert refused.json()["violated-policies"] == ["per-hour"]


async def test_several_limits_share_the_fields(edge: Edge) -> None:
    async with edge.serve(App(), ["9/hour", "1/minute"]) as client:
        first, second = [await client.get("/") for _ in range(2)]
    assert (first.status_code, second.status_code) == (200, 429)
    assert is_complete(first)
    assert is_complete(second)
    assert left(first) == {"per-hour": 8, "per-minute": 0}
    assert second.headers["x-ratelimit-limit"] == "1"


async def test_violated_policies_in_body_match_names_in_fields(edge: Edge) -> None:
    async with edge.serve(App(), ["9/minute", "1/minute"]) as client:
        await client.get("/")
        refused = await client.get("/")
    assert sorted(policies(refused).values()) == [1, 9]
    if edge.has_problems:
        [violated] = refused.json()["violated-policies"]
        assert policies(refused)[violated] == 1


@pytest.mark.parametrize("options", [{}, {"count": {200}}], ids=["hit", "hold"])
@pytest.mark.parametrize("own", [None, "7/minute"])
async def test_quota_function_of_the_limiter_is_called_once_per_request(
    edge: Edge, options: dict[str, Any], own: str | None
) -> None:
    asked = []

    def quota(key: Any, tier: str | None) -> str | None:
        asked.append(key)
        return own

    limiter = edge.kind("5/minute", quotas=quota, quotas_for=0)
    async with edge.serve(App(), [limiter], key=by_header("x-user"), **options) as client:
        response = await client.get("/", headers={"x-user": "a"})
    assert asked == ["a"]
    assert left(response) == {"per-minute": 4 if own is None else 6}


# --- Responses match those of `Writer` and `refusal` -----------------------------------------------------------------------

START = 1_700_000_000.25
REALM: dict[str, Any] = {"user": by_address(), "realm": by_header("x-realm")}
TIERED = fixed_window("2/minute", tiers={"pro": "3/minute"})

SHAPES: dict[str, tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]] = {
    # Rules, options of the edge, and arguments of `Limiter.hit` for the same requests.
    "one rule": (("3/minute",), {}, {"key": ADDRESS}),
    "token bucket": ((token_bucket("3/minute", burst=2),), {}, {"key": ADDRESS}),
    "two rules": (("3/minute", "4/hour"), {}, {"key": ADDRESS}),
    "never": (("0/minute", "4/hour"), {}, {"key": ADDRESS}),
    "tier": ((TIERED,), {"tier": lambda _: "pro"}, {"key": ADDRESS, "tier": "pro"}),
    "unknown tier": ((TIERED,), {"tier": "other"}, {"key": ADDRESS, "tier": "other"}),
    "cost": (("5/minute",), {"cost": lambda _: 2}, {"key": ADDRESS, "cost": 2}),
    "by address as bytes": (("2/minute",), {"key": by_header("x-missing")}, {"key": ADDRESS.encode()}),
    "three scopes": (
        (
            sliding_window("9/minute", scope="user"),
            fixed_window("3/minute", scope="realm"),
            sliding_window("9/day", scope="*"),
        ),
        {"key": REALM},
        {"key": {"user": ADDRESS, "realm": "north"}},
    ),
    "no rules": ((), {}, {"key": ADDRESS}),
}

Seen = list[tuple[int, dict[str, str], str]]


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
        seen.append((429 if answer else 200, names, answer.body.decode() if answer else ""))
        clock.advance(7)
    return seen


@pytest.mark.parametrize("name", ["asgi", "wsgi", "fastapi"])
@pytest.mark.parametrize("shape", SHAPES)
async def test_response_matches_writer_and_refusal(shape: str, name: str) -> None:
    rules, options, asked = SHAPES[shape]
    clock, edge, seen = FakeClock(START), EDGES[name], []
    async with edge.serve(App(), [edge.kind(*rules, clock=clock)], **options) as client:
        for _ in range(6):
            response = await client.get("/", headers={"x-realm": "north"})
            fields = {
                name: value for name, value in response.headers.items() if "rate" in name or "retry" in name
            }
            seen.append((response.status_code, fields, "" if response.is_success else response.text))
            clock.advance(7)
    assert seen == expected(rules, asked, 6)


# --- Limits of views ------------------------------------------------------------------------------------------------------


FRAMEWORKS = ("fastapi", "flask views", "django views", "django views, asgi", "aiohttp views")


@pytest.mark.parametrize("name", FRAMEWORKS)
async def test_views_override_the_default_limits(name: str) -> None:
    edge = EDGES[name]
    shared = edge.make("2/minute")
    views = {
        "own": [shared],
        "same": [shared],
        "both": [edge.make("7/day"), edge.make("5/week")],
        "other": [],
        "free": [None],
        "freed": [None, edge.make("3/day")],
    }
    site = [edge.make("9/hour", default=True), edge.make("30/hour", default=True)]
    async with edge.run(App(), site, views) as client:
        assert policies(await client.get("/own")) == {"per-minute": 2}
        assert left(await client.get("/same")) == {"per-minute": 0}
        refused = await client.get("/own")
        assert (refused.status_code, refused.json()["violated-policies"]) == (429, ["per-minute"])
        both = await client.get("/both")
        assert (left(both), both.text) == ({"per-day": 6, "per-week": 4}, "4")
        assert policies(await client.get("/other")) == {"per-hour": 30}
        free = await client.get("/free")
        assert (free.text, "ratelimit" in free.headers) == ("none", False)
        assert policies(await client.get("/freed")) == {"per-day": 3}


@pytest.mark.parametrize("name", FRAMEWORKS)
async def test_views_are_limited_in_addition_to_other_limits(name: str) -> None:
    edge = EDGES[name]
    async with edge.run(App(), [edge.make("2/hour")], {"": [edge.make("9/minute")]}) as client:
        assert set(policies(await client.get("/"))) == {"per-hour", "per-minute"}
        assert await codes(client, "/", "/") == [200, 429]


# --- CORS ---------------------------------------------------------------------------------------------------------------

PREFLIGHT = {"origin": "https://page.example", "access-control-request-method": "POST"}


async def test_preflights_are_not_charged(edge: Edge) -> None:
    async with edge.serve(App(), ["1/minute"]) as client:
        for _ in range(3):
            assert (await client.options("/", headers=PREFLIGHT)).status_code == 200
        assert await codes(client, "/", "/") == [200, 429]
        assert (await client.options("/", headers=PREFLIGHT)).status_code == 200
        for missing in PREFLIGHT:
            other = {name: value for name, value in PREFLIGHT.items() if name != missing}
            assert (await client.options("/", headers=other)).status_code == 429
        assert (await client.get("/", headers=PREFLIGHT)).status_code == 429


# --- Unavailable store --------------------------------------------------------------------------------------------------


class Down(MemoryStore):
    """A remote store that is unavailable."""

    remote = True

    def bind(self, *arguments: Any, **options: Any) -> Any:
        return DownGate()

    def bind_async(self, *arguments: Any, **options: Any) -> Any:
        return AsyncDownGate()


class DownGate:
    """Its gate for threads."""

    def decide(self, *arguments: Any) -> Any:
        raise StoreUnavailable("gone")

    refund = reset = decide


class AsyncDownGate:
    """Its gate for tasks."""

    async def decide(self, *arguments: Any) -> Any:
        raise StoreUnavailable("gone")

    refund = reset = decide


@pytest.mark.parametrize(("policy", "status"), [("open", 200), ("closed", 503), ("raise", 500)])
async def test_failure_policy_answers_while_the_store_is_down(edge: Edge, policy: Any, status: int) -> None:
    limiter = edge.kind("5/minute", name="x", store=Down(), on_store_error=policy)
    async with edge.serve(App(), [limiter]) as client:
        response = await client.get("/")
    assert response.status_code == status
    if status == 503 and edge.has_problems:
        assert response.json()["type"].endswith("#temporary-reduced-capacity")
        assert int(response.headers["retry-after"]) >= 1
