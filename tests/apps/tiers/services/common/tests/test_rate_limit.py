"""Base behaviours, the same on every back end."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from math import ceil, floor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from headgate.errors import ConfigError, CostTooHigh
from headgate.testing import FakeClock
from headgate_services.tiers import (
    DEFAULT_RATE_LIMITS,
    RateLimitExceeded,
    RateLimitMiddleware,
    TierLimit,
    TokenBucketRateLimiter,
    setup_rate_limiting,
)
from headgate_services.tiers.limits import limits_by_tier, parse_rate_limits
from tests.apps.tiers.support import Limited, Make, application, limited

FIELDS = ("x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset")


@pytest.fixture(params=["memory", "pipeline", "atomic"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    """Return a function that puts the middleware in front of an application, on each of the back ends."""
    if request.param == "memory":
        yield lambda **options: limited(None, **options)
        return
    client = setup_rate_limiting(request.getfixturevalue("headgate_redis_url"), timeout=30)
    assert client is not None
    async with client:
        yield lambda **options: limited(client, atomic=request.param == "atomic", **options)


def figures(answer: httpx.Response) -> tuple[int, int, int]:
    """Return limit, remaining and reset of a response."""
    limit, remaining, reset = (int(answer.headers[name]) for name in FIELDS)
    return limit, remaining, reset


def fresh_user() -> str:
    """Return an id that no other test has."""
    return secrets.token_hex(8)


# --- Header fields ---------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S-01", "S-08", "S-28")
async def test_s01_every_response_carries_the_fields_and_only_a_429_retry_after(make: Make) -> None:
    app = make()
    answers = [await app.get(path) for path in ("/ok", "/nowhere", "/fails", "/raises", "/ok", "/ok")]
    assert [answer.status_code for answer in answers] == [200, 404, 500, 500, 200, 429]
    assert [figures(answer)[:2] for answer in answers] == [(5, 4), (5, 3), (5, 2), (5, 1), (5, 0), (5, 0)]
    assert ["retry-after" in answer.headers for answer in answers] == [False] * 5 + [True]


@pytest.mark.requirement("S-02", "S-12")
@pytest.mark.parametrize(("tier", "limit", "capacity"), [("free", 10, 5), ("plus", 60, 10), ("pro", 300, 50)])
async def test_s02_the_limit_is_that_of_the_tier_per_minute(
    make: Make, tier: str, limit: int, capacity: int
) -> None:
    answer = await make().get(user=f"{fresh_user()}/{tier}")
    assert figures(answer)[:2] == (limit, capacity - 1)


@pytest.mark.requirement("S-03")
async def test_s03_an_unknown_tier_is_anonymous_for_the_field_and_for_the_limit(make: Make) -> None:
    """The user is known before the limiter runs, so this is not just an anonymous request that looks right."""
    limits = {"anonymous": TierLimit(6, 2), "free": TierLimit(60, 20)}
    app, user = make(rate_limits=limits), fresh_user()
    assert figures(await app.get(user=f"{user}/mystery")) == (6, 1, int(app.clock.now) + 10)
    assert await app.statuses(2, user=f"{user}/mystery") == [200, 429]
    # Counted for the user, not for the address: other users of the address have separate buckets.
    assert figures(await app.get()) == (6, 1, int(app.clock.now) + 10)
    assert figures(await app.get(user=fresh_user()))[:2] == (60, 19)


@pytest.mark.requirement("S-04", "S-05")
async def test_s04_remaining_falls_by_one_and_is_rounded_down(make: Make) -> None:
    app = make()
    assert [figures(await app.get())[1] for _ in range(3)] == [4, 3, 2]
    app.clock.advance(6)  # half a token
    assert figures(await app.get())[1] == 1
    app.clock.advance(6)  # the other half: 1.5 + 0.5 - 1
    assert figures(await app.get())[1] == 1


@pytest.mark.requirement("S-06", "S-07")
@pytest.mark.parametrize("second", [0.0, 29.25, 59.999999])
async def test_s06_reset_is_the_moment_when_the_bucket_is_full(make: Make, second: float) -> None:
    app = make(rate_limits={"anonymous": TierLimit(60, 10)})
    app.clock.advance(second)
    for _ in range(4):
        await app.get()
    assert figures(await app.get()) == (60, 5, floor(app.clock.now) + 5)
    app.clock.advance(0.75)
    # 5.75 left, one taken: 5.25 missing at one per second. From the floor of 4 it would be 6 whole seconds all the same,
    # so go on to where the two differ.
    assert figures(await app.get()) == (60, 4, floor(app.clock.now) + 6)
    app.clock.advance(2.5)
    assert figures(await app.get()) == (60, 6, floor(app.clock.now) + ceil(10 - 6.25))


@pytest.mark.requirement("S-06")
async def test_sx4_reset_means_the_same_on_a_429(make: Make) -> None:
    app = make()
    await app.statuses(5)
    app.clock.advance(3)
    refused = await app.get()
    assert refused.headers["retry-after"] == "9"
    assert figures(refused) == (5, 0, int(app.clock.now) + 57)  # 4.75 tokens at one per 12 s


@pytest.mark.requirement("S-09", "S-10")
async def test_s09_waiting_retry_after_is_enough_and_a_second_less_is_not(make: Make) -> None:
    app = make()
    await app.statuses(5)
    refused = await app.get()
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "12")
    app.clock.advance(11)
    assert (await app.get()).headers["retry-after"] == "1"
    app.clock.advance(1)
    assert await app.statuses(2) == [200, 429]


@pytest.mark.requirement("S-10")
async def test_sx10_the_body_of_a_429(make: Make) -> None:
    app = make()
    await app.statuses(5)
    refused = await app.get("/ok?page=2")
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.json() == {
        "type": "https://datatracker.ietf.org/doc/html/rfc6585#section-4",
        "title": "Too Many Requests",
        "status": 429,
        "detail": "Rate limit exceeded. Please retry after 12 seconds.",
        "instance": "/ok",
        "limit": 5,
        "window": 60,
        "retry_after": 12,
    }


@pytest.mark.requirement("S-04")
async def test_remaining_is_of_the_request_it_is_sent_with(make: Make) -> None:
    app = make()
    answers = await asyncio.gather(*(app.get() for _ in range(8)))
    admitted = [figures(answer)[1] for answer in answers if answer.status_code == 200]
    assert sorted(admitted) == [0, 1, 2, 3, 4]


# --- The bucket ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S-11")
async def test_s11_a_burst_of_the_capacity_then_one_per_refill(make: Make) -> None:
    app = make(rate_limits={"anonymous": TierLimit(60, 3)})
    assert await app.statuses(4) == [200, 200, 200, 429]
    for _ in range(5):
        app.clock.advance_us(999_999)
        assert await app.statuses(1) == [429]
        app.clock.advance_us(1)
        assert await app.statuses(2) == [200, 429]


@pytest.mark.requirement("S-13")
async def test_s13_the_balance_stays_between_zero_and_the_capacity(make: Make) -> None:
    app = make()
    assert [figures(await app.get())[1] for _ in range(9)] == [4, 3, 2, 1, 0, 0, 0, 0, 0]
    app.clock.advance(86_400)
    assert figures(await app.get())[1] == 4
    app.clock.advance(-3_600)
    assert figures(await app.get())[1] == 3


@pytest.mark.requirement("S-13")
async def test_refusals_do_not_move_the_moment_when_a_token_comes_back(make: Make) -> None:
    app = make()
    await app.statuses(5)
    for waited in range(12):
        assert (await app.get()).headers["retry-after"] == str(12 - waited)
        app.clock.advance(1)
    assert await app.statuses(1) == [200]


@pytest.mark.requirement("S-11")
@pytest.mark.parametrize("atomic", [False, True])
async def test_s11_a_cost_is_taken_whole_or_not_at_all(client: Redis, key: str, atomic: bool) -> None:
    limiter = TokenBucketRateLimiter(5, 1 / 3600, client, use_atomic_redis=atomic)
    assert await limiter.check_rate_limit(key, 3) == (True, 0)
    allowed, retry_after = await limiter.check_rate_limit(key, 3)
    assert not allowed
    assert 3590 <= retry_after <= 3600
    refused = await limiter.take(key, 3)
    assert floor(refused.remaining) == 2  # SX-14: some are left, not enough
    assert (await limiter.take(key, 0)).allowed
    assert await limiter.check_rate_limit(key, 2) == (True, 0)
    with pytest.raises(CostTooHigh):
        await limiter.take(key, 6)
    with pytest.raises(ConfigError):
        await limiter.take(key, -1)


@pytest.mark.parametrize(("capacity", "rate"), [(0, 1.0), (2.5, 1.0), (5, 0.0), (5, float("nan"))])
def test_a_bucket_that_cannot_be_is_refused(capacity: Any, rate: float) -> None:
    with pytest.raises(ConfigError):
        TokenBucketRateLimiter(capacity, rate)


# --- Keys of callers --------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S-12")
def test_s12_the_tiers_and_their_capacities() -> None:
    assert dict(DEFAULT_RATE_LIMITS) == {"anonymous": 5, "free": 10, "plus": 60, "pro": 300}
    capacities = {tier: limit.capacity for tier, limit in limits_by_tier(None).items()}
    assert capacities == {"anonymous": 5, "free": 5, "plus": 10, "pro": 50}


@pytest.mark.requirement("S-12")
def test_limits_are_read_from_text() -> None:
    assert parse_rate_limits("anonymous=5, pro=600,odd-1=7 burst 2") == {
        "anonymous": TierLimit(5, 5),
        "pro": TierLimit(600, 100),
        "odd-1": TierLimit(7, 2),
    }
    for wrong in ("pro=5", "anonymous=0", "anonymous", "anonymous=5, anonymous=6", "anonymous=5/s", ""):
        with pytest.raises(ConfigError):
            parse_rate_limits(wrong)


async def test_a_user_without_tier_is_free_and_without_id_counts_by_address(make: Make) -> None:
    app = make()
    assert figures(await app.get(user=fresh_user()))[0] == 10
    middleware = app.app.app
    scope = {"state": {"user": {"tier": "pro"}}, "client": ("192.0.2.7", 1), "headers": []}
    who = middleware.identify(scope)
    assert (who.key, who.tier) == ("ip:192.0.2.7", "pro")


async def test_a_user_who_changes_tier_does_not_get_a_fresh_bucket(make: Make) -> None:
    app, user = make(), fresh_user()
    assert await app.statuses(6, user=f"{user}/plus") == [200] * 6
    assert figures(await app.get(user=f"{user}/free"))[1] <= 3
    assert (await app.statuses(5, user=f"{user}/free"))[-1] == 429


async def test_no_user_can_be_called_like_an_address(make: Make) -> None:
    app = make()
    await app.statuses(6)
    for forged in (f"ip:{app.address}/free", f"../ip:{app.address}", "a:tokens", "a:time", "a"):
        assert figures(await app.get(user=fresh_user() + forged))[1] == 4
    middleware: RateLimitMiddleware = app.app.app
    named = {
        middleware.identify({"state": {"user": SimpleNamespace(id=user)}, "headers": []}).key
        for user in ("1", "ip:1", "user:1", "1:tokens")
    }
    assert named == {"user:1", "user:ip:1", "user:user:1", "user:1:tokens"}


async def test_an_ipv6_client_has_one_bucket_for_its_whole_network(make: Make) -> None:
    app, others = make(rate_limits={"anonymous": TierLimit(5, 1)}), fresh_user()[:4]
    seen = []
    for host in (1, 2):
        app.address = f"2001:db8:{others}:7::{host}"
        seen += await app.statuses(1)
    assert seen == [200, 429]


# --- The middleware as a neighbour -----------------------------------------------------------------------------------


@pytest.mark.requirement("S-01")
async def test_sx9_excluded_paths_have_no_fields_and_take_no_tokens(make: Make) -> None:
    app = make()
    for path in ("/health", "/metrics", "/"):
        answer = await app.get(path)
        assert answer.status_code == 200
        assert not [name for name in answer.headers if "ratelimit" in name]
    assert figures(await app.get("/health/deep"))[1] == 4  # exactly these paths, and nothing before
    assert figures(await make(exclude_paths=["/ok"]).get("/health"))[0] == 5


@pytest.mark.requirement("S-01")
async def test_the_fields_are_there_when_the_application_adds_the_middleware_itself() -> None:
    inner = application()
    inner.add_middleware(RateLimitMiddleware, use_atomic_redis=False, clock=FakeClock())
    answer = await Limited(inner, FakeClock()).get("/raises")
    assert (answer.status_code, answer.text) == (500, "Internal Server Error")
    assert figures(answer)[1] == 4


async def call(app: Any, scope: dict[str, Any]) -> list[dict[str, Any]]:
    """Call an ASGI application and return its messages."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(dict(message))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    await app(scope, receive, send)
    return sent


SCOPE = {"type": "http", "path": "/x", "method": "GET", "headers": [], "client": ("192.0.2.1", 1)}


async def test_an_exception_is_raised_again_and_never_answered_twice() -> None:
    async def half_done(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("in the middle")

    sent: list[Any] = []
    middleware = RateLimitMiddleware(half_done, use_atomic_redis=False)

    async def send(message: Any) -> None:
        sent.append(message)

    with pytest.raises(RuntimeError, match="in the middle"):
        await middleware(dict(SCOPE), None, send)  # type: ignore[arg-type]
    assert [message["type"] for message in sent] == ["http.response.start"]


async def test_an_application_may_raise_a_refusal_of_its_own() -> None:
    async def busy(scope: Any, receive: Any, send: Any) -> None:
        raise RateLimitExceeded(2, 3600, 90, "Two exports an hour.")

    start, body = await call(RateLimitMiddleware(busy, use_atomic_redis=False), dict(SCOPE))
    fields = dict(start["headers"])
    assert (start["status"], fields[b"retry-after"], fields[b"x-ratelimit-limit"]) == (429, b"90", b"5")
    assert b'"detail": "Two exports an hour."' in body["body"]


async def test_fields_of_the_same_name_are_replaced_and_others_kept() -> None:
    async def boastful(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"X-RateLimit-Limit", b"1000000"), (b"retry-after", b"7")]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body"})

    start, _ = await call(RateLimitMiddleware(boastful, use_atomic_redis=False), dict(SCOPE))
    assert start["headers"][0] == (b"retry-after", b"7")  # the application's own, about something else
    assert [name for name, _ in start["headers"][1:]] == [name.encode() for name in FIELDS]


async def test_what_is_not_http_passes_through() -> None:
    seen = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    for kind in ("websocket", "lifespan"):
        scope = {"type": kind, "path": "/x"}
        await call(RateLimitMiddleware(inner, use_atomic_redis=False), scope)
        assert seen.pop() is scope


async def test_the_line_about_a_refusal_says_who_was_refused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "headgate_services")
    service = limited(None, rate_limits={"anonymous": TierLimit(1, 1), "free": TierLimit(1, 1)})
    await service.statuses(2)
    await service.statuses(2, user="ada.lovelace@example.org")
    lines = [message for message in caplog.messages if "exceeded" in message]
    assert f"exceeded: ip:{service.address} from {service.address}, tier anonymous" in lines[0]
    assert f"exceeded: user:ada.… from {service.address}, tier free" in lines[1]
    assert "lovelace" not in caplog.text
