"""Which back end answers, and what happens when it cannot."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from headgate.clock import SteadyClock
from headgate.testing import FakeClock
from headgate.testing.servers import RedisServer
from headgate_services.tiers import RateLimitMiddleware, TokenBucketRateLimiter, setup_rate_limiting
from headgate_services.tiers import backends as backends_module
from headgate_services.tiers.backends import MemoryBackend
from headgate_services.tiers.bucket import Bucket, Outcome
from headgate_services.tiers.rate_limiter import Backends
from tests.apps.processes import until
from tests.apps.tiers.support import application, limited

SLOW = Bucket(5, 1 / 3600)
"""Five at once, and then none for the length of any test."""

both_modes = pytest.mark.parametrize("atomic", [False, True], ids=["pipeline", "atomic"])


def patient(client: Redis | None, *, atomic: bool, **options: Any) -> Backends:
    """Return back ends that do not take a busy machine for an outage."""
    return Backends(client, atomic=atomic, **{"deadline": 30, **options})


def calls(client: redis.Redis) -> Counter[str]:
    """Return how often the server was given each command so far."""
    stats: Any = client.info("commandstats")
    return Counter({name.removeprefix("cmdstat_"): found["calls"] for name, found in stats.items()})


async def seen_by(server_url: str, requests: Any) -> list[list[str]]:
    """Return the commands that a server was given while something was done, as MONITOR shows them."""
    marker = secrets.token_hex(8)
    async with Redis.from_url(server_url, decode_responses=True) as client, client.monitor() as monitor:
        await requests()
        await client.echo(marker)
        seen = []
        while marker not in (command := await monitor.next_command())["command"]:
            seen.append(command["command"].split())
        return [
            words for words in seen if words[0] not in ("HELLO", "CLIENT")
        ]  # of connections that were made


# --- Which back end --------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S-18", "S-21", "S-23", "S-24")
async def test_s21_with_the_flag_a_request_is_one_evalsha(any_url: str, client: Redis, key: str) -> None:
    limiter = TokenBucketRateLimiter(5, 5 / 60, client, use_atomic_redis=True)
    await limiter.take(key)  # from here on the script is registered
    seen = await seen_by(any_url, lambda: limiter.take(key))
    [call, *inside] = seen
    assert call[0] == "EVALSHA"
    assert call[2:5] == ["2", f"ratelimit:{key}:tokens", f"ratelimit:{key}:time"]
    capacity, refill_rate, cost, now, ttl = call[5:]
    assert (capacity, float(refill_rate), cost, ttl) == ("5", 5 / 60, "1", "120")
    assert abs(float(now) - SteadyClock().now_us() / 1e6) < 60
    assert [command[0] for command in inside] == ["TIME", "GET", "GET", "SETEX", "SETEX"]


@pytest.mark.requirement("S-21")
async def test_s21_calls_are_requests_admitted_or_not(plain: redis.Redis, client: Redis) -> None:
    app = limited(client, atomic=True)
    await app.get()
    before = calls(plain)
    assert (await app.statuses(9))[-1] == 429
    after = calls(plain)
    assert after["evalsha"] - before["evalsha"] == 9
    assert after["eval"] == before["eval"]


@pytest.mark.requirement("S-18", "S-27")
async def test_s27_without_the_flag_it_is_the_pipeline(any_url: str, client: Redis, key: str) -> None:
    limiter = TokenBucketRateLimiter(1, 1 / 3600, client)
    admitted = await seen_by(any_url, lambda: limiter.take(key))
    assert [command[0] for command in admitted] == [
        "WATCH",
        "GET",
        "GET",
        "TIME",
        "MULTI",
        "SETEX",
        "SETEX",
        "EXEC",
    ]
    refused = await seen_by(any_url, lambda: limiter.take(key))
    assert [command[0] for command in refused] == ["WATCH", "GET", "GET", "TIME", "UNWATCH"]


@pytest.mark.requirement("S-18")
@pytest.mark.parametrize(
    ("value", "backend"), [(None, "pipeline"), ("false", "pipeline"), ("true", "atomic")]
)
async def test_s18_the_variable_switches_it(
    client: Redis, monkeypatch: pytest.MonkeyPatch, value: str | None, backend: str
) -> None:
    if value is not None:
        monkeypatch.setenv("SAJU_ENABLE_ATOMIC_RATE_LIMITER", value)
    middleware = RateLimitMiddleware(application(), redis_client=client, deadline=30)
    scope: Any = {"type": "http", "path": "/ok", "headers": [], "client": (secrets.token_hex(8), 1)}
    assert (await middleware.decide(scope)).outcome.backend == backend


@pytest.mark.requirement("S-19")
async def test_s19_enabled_without_redis_still_limits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert setup_rate_limiting(None) is None
    assert caplog.messages == ["Rate limiting: Redis URL not provided, using local fallback"]
    assert (await limited(None, atomic=True).statuses(6))[-1] == 429


@pytest.mark.requirement("S-24")
@both_modes
async def test_s24_keys_live_at_least_as_long_as_a_bucket_fills(
    plain: redis.Redis, client: Redis, key: str, atomic: bool
) -> None:
    limiter = TokenBucketRateLimiter(5, 5 / 60, client, use_atomic_redis=atomic)
    for _ in range(5):
        await limiter.take(key)
        for name in ("tokens", "time"):
            assert 110 <= plain.ttl(f"ratelimit:{key}:{name}") <= 120


# --- Together (SL-1, SL-2 overcome) ----------------------------------------------------------------------------------


@pytest.mark.requirement("S-26")
@both_modes
@pytest.mark.parametrize("capacity", [1, 7])
async def test_s26_two_instances_never_admit_more_than_there_is(
    client: Redis, other_client: Redis, key: str, atomic: bool, capacity: int
) -> None:
    instances = [patient(one, atomic=atomic) for one in (client, other_client)]
    bucket = Bucket(capacity, 1 / 3600)
    outcomes = await asyncio.gather(*(instances[n % 2].take(bucket, key, 1) for n in range(100)))
    assert Counter(outcome.allowed for outcome in outcomes) == {True: capacity, False: 100 - capacity}
    assert {outcome.backend for outcome in outcomes} == {"atomic" if atomic else "pipeline"}


async def test_a_race_is_lost_once_and_decided_anew(
    client: Redis, plain: redis.Redis, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between reading and writing somebody else takes three; the balance must show both."""
    instance = patient(client, atomic=False)
    await instance.take(SLOW, key, 1)
    others = iter(["1"])
    _write_in_between(monkeypatch, plain, key, others)
    outcome = await instance.take(SLOW, key, 1)
    assert (outcome.allowed, int(outcome.remaining)) == (True, 0)
    assert not (await instance.take(SLOW, key, 1)).allowed


async def test_races_are_not_lost_for_ever(
    client: Redis, plain: redis.Redis, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever always comes too late is refused, never let through unasked."""
    monkeypatch.setattr(backends_module, "MOST_TRIES", 3)
    instance = patient(client, atomic=False)
    await instance.take(SLOW, key, 1)
    _write_in_between(monkeypatch, plain, key, iter("333333"))
    outcome = await instance.take(SLOW, key, 1)
    assert (outcome.allowed, outcome.retry_after, outcome.backend) == (False, 1, "pipeline")


def _write_in_between(
    monkeypatch: pytest.MonkeyPatch, plain: redis.Redis, key: str, balances: Iterator[str]
) -> None:
    execute = Pipeline.execute

    async def write_first(pipeline: Any) -> Any:
        if (balance := next(balances, None)) is not None:
            plain.set(f"ratelimit:{key}:tokens", balance)
        return await execute(pipeline)

    monkeypatch.setattr(Pipeline, "execute", write_first)


@both_modes
@pytest.mark.parametrize("skew", [3600, -3600])
async def test_an_instance_with_a_wrong_clock_gains_nothing(
    client: Redis, other_client: Redis, key: str, monkeypatch: pytest.MonkeyPatch, atomic: bool, skew: int
) -> None:
    right = patient(client, atomic=atomic)

    class Skewed(SteadyClock):
        def __init__(self) -> None:
            super().__init__()
            self.epoch_us += skew * 10**6

    monkeypatch.setattr(backends_module, "SteadyClock", Skewed)
    wrong = patient(other_client, atomic=atomic)
    bucket = Bucket(5, 5 / 60)
    for first, second in ((right, wrong), (wrong, right)):
        who = f"{key}:{first is right}"
        assert all([(await first.take(bucket, who, 1)).allowed for _ in range(5)])
        assert [(await instance.take(bucket, who, 1)).allowed for instance in (second, first)] == [False] * 2


# --- When the script cannot be used (SL-3 overcome) -------------------------------------------------------------------


@pytest.fixture
def restricted(plain: redis.Redis) -> Iterator[str]:
    """The name of a user of the server, which is also the password."""
    name = f"u{secrets.token_hex(8)}"
    allow(plain, name, "on", f">{name}", "~*", "+@all")
    yield name
    plain.acl_deluser(name)


def allow(plain: redis.Redis, name: str, *rules: str) -> None:
    """Change the rights of a user of the server."""
    plain.execute_command("ACL", "SETUSER", name, *rules)


def restricted_client(url: str, name: str) -> Redis:
    client = setup_rate_limiting(url.replace("redis://", f"redis://{name}:{name}@"), timeout=30)
    assert client is not None
    return client


@pytest.mark.requirement("S-22")
async def test_s22_without_the_right_to_register_it_is_the_pipeline_until_there_is_one(
    any_url: str, plain: redis.Redis, restricted: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    allow(plain, restricted, "-script", "-evalsha")
    async with restricted_client(any_url, restricted) as client:
        clock = FakeClock()
        instance = patient(client, atomic=True, monotonic=lambda: clock.now)
        assert [(await instance.take(SLOW, key, 1)).backend for _ in range(3)] == ["pipeline"] * 3
        [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert "atomic script not registered, using the pipeline" in warning.getMessage()
        clock.advance(1.1)
        assert (await instance.take(SLOW, key, 1)).backend == "pipeline"
        warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == 2  # one per try, and tries become rarer
        allow(plain, restricted, "+script", "+evalsha")
        clock.advance(1.1)
        assert (await instance.take(SLOW, key, 1)).backend == "pipeline"
        clock.advance(1)
        assert await take_twice(instance, key) == [("atomic", False), ("atomic", False)]  # all five are gone


async def take_twice(instance: Backends, key: str) -> list[tuple[str, bool]]:
    outcomes = [await instance.take(SLOW, key, 1) for _ in range(2)]
    return [(outcome.backend, outcome.allowed) for outcome in outcomes]


@pytest.mark.requirement("S-20", "S-22")
async def test_s20_without_the_file_it_is_the_pipeline(
    client: Redis, key: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backends_module, "SCRIPT", "gone.lua")
    clock = FakeClock()
    instance = patient(client, atomic=True, monotonic=lambda: clock.now)
    assert (await instance.take(SLOW, key, 1)).backend == "pipeline"
    assert "atomic script not registered" in caplog.text
    monkeypatch.undo()
    clock.advance(2)
    assert (await instance.take(SLOW, key, 1)).backend == "atomic"


async def test_sx8_a_script_that_fails_falls_back_for_that_request(
    any_url: str, plain: redis.Redis, restricted: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    allow(plain, restricted, "-evalsha")
    async with restricted_client(any_url, restricted) as client:
        instance = patient(client, atomic=True)
        assert (await instance.take(SLOW, key, 1)).backend == "pipeline"
        assert sum(record.levelno == logging.WARNING for record in caplog.records) == 1
        assert "atomic script failed, using the pipeline for this request" in caplog.text
        assert {(await instance.take(SLOW, f"{key}2", 1)).backend for _ in range(40)} == {"pipeline"}
        assert 1 <= len(caplog.records) < 20  # a script that always fails does not flood the log
        allow(plain, restricted, "+evalsha")
        outcome = await instance.take(SLOW, key, 1)
        assert (outcome.backend, int(outcome.remaining)) == ("atomic", 3)


async def test_sx8_a_lost_script_is_loaded_again(
    client: Redis, plain: redis.Redis, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    instance = patient(client, atomic=True)
    await instance.take(SLOW, key, 1)
    plain.script_flush()
    outcome = await instance.take(SLOW, key, 1)
    assert (outcome.backend, int(outcome.remaining)) == ("atomic", 3)
    assert caplog.records == []


@both_modes
async def test_a_key_that_is_not_ours_is_limited_locally_and_spoils_nothing_else(
    client: Redis, plain: redis.Redis, key: str, atomic: bool, caplog: pytest.LogCaptureFixture
) -> None:
    instance = patient(client, atomic=atomic)
    plain.rpush(f"ratelimit:{key}:tokens", "a list")
    plain.mset({f"ratelimit:{key}2:tokens": "many", f"ratelimit:{key}2:time": "now"})
    for bad in (key, f"{key}2"):
        outcomes = [await instance.take(SLOW, bad, 1) for _ in range(6)]
        assert [outcome.allowed for outcome in outcomes] == [True] * 5 + [False]
        assert {outcome.backend for outcome in outcomes} == {"memory"}
    assert "Rate limit check failed: the value of ratelimit:" in caplog.text
    assert (await instance.take(SLOW, f"{key}3", 1)).backend == ("atomic" if atomic else "pipeline")


# --- When Redis is down (SL-4 overcome) ------------------------------------------------------------------------------


@both_modes
async def test_down_means_local_limits_one_failure_and_back_by_itself(
    server: RedisServer, key: str, atomic: bool, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    client = setup_rate_limiting(server.url, timeout=30)
    assert client is not None
    async with client:
        instance = patient(client, atomic=atomic, monotonic=lambda: clock.now)
        mode = "atomic" if atomic else "pipeline"
        assert (await instance.take(SLOW, key, 1)).backend == mode
        server.kill()
        outcomes = [await instance.take(SLOW, key, 1) for _ in range(20)]
        assert [outcome.allowed for outcome in outcomes] == [True] * 5 + [False] * 15
        assert {outcome.backend for outcome in outcomes} == {"memory"}
        assert caplog.text.count("Rate limit check failed") == 1
        server.start()

        async def is_back() -> bool:
            clock.advance(3)  # longer than any pause
            return (await instance.take(SLOW, key, 1)).backend == mode

        await until(is_back)
        assert "is back after" in caplog.text
        assert (await instance.take(SLOW, key, 1)).backend == mode


@both_modes
async def test_a_hanging_redis_costs_one_timeout_and_stalls_nobody(
    server: RedisServer, key: str, atomic: bool
) -> None:
    client = setup_rate_limiting(server.url, timeout=30)
    assert client is not None
    async with client:
        clock = FakeClock()
        instance = Backends(client, atomic=atomic, deadline=0.2, monotonic=lambda: clock.now)
        asked = 0
        ask_redis = instance._ask_redis

        async def counted(*arguments: Any) -> Outcome:
            nonlocal asked
            asked += 1
            return await ask_redis(*arguments)

        instance._ask_redis = counted  # type: ignore[method-assign]
        server.pause()
        try:
            waiting = asyncio.create_task(instance.take(SLOW, key, 1))
            await until(lambda: asked)
            # The event loop is free while one request waits for Redis: this is answered before that one.
            app = limited(None)
            assert await app.statuses(1) == [200]
            assert not waiting.done()
            assert (await waiting).backend == "memory"
            assert {(await instance.take(SLOW, key, 1)).backend for _ in range(20)} == {"memory"}
            assert asked == 1
        finally:
            server.resume()


def test_memory_is_bounded() -> None:
    memory = MemoryBackend(FakeClock(), max_keys=50)
    outcomes = [memory.take(SLOW, f"ip:{n}", 1) for n in range(1000)]
    assert all(outcome.allowed for outcome in outcomes[:50])
    assert len(memory.store) <= 51
    # Beyond it all new keys share one bucket: nobody gets more by making up addresses.
    assert sum(outcome.allowed for outcome in outcomes[50:]) == 5
