"""Constructors of stores, hooks and helpers check their arguments: the error names the invalid argument."""

# These tests pass wrong types on purpose.
# mypy: disable-error-code="arg-type"

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import redis
import redis.asyncio
from prometheus_client import CollectorRegistry

from headgate import (
    AsyncLimiter,
    ConfigError,
    Limiter,
    MemoryStore,
    SQLiteStore,
    concurrent,
    local,
    open_store,
)
from headgate.client import ServerStore
from headgate.http import by_address
from headgate.http.asgi import RateLimitMiddleware
from headgate.observe import RedactingFilter, TopKeys
from headgate.observe.opentelemetry import OpenTelemetryHook
from headgate.observe.prometheus import PrometheusHook, ShadowHook
from headgate.policy import AsyncLivePolicy, LivePolicy, load_policy, parse_policy
from headgate.stores.kv.cloudflare import CloudflareKV
from headgate.stores.kv.redis import RedisKV
from headgate.stores.postgres import AsyncBucketTable, BucketTable
from headgate.testing import FakeClock

URL = "http://127.0.0.1:8080"


def prometheus(**options: Any) -> PrometheusHook:
    return PrometheusHook(CollectorRegistry(), **options)


def table(kind: Callable[..., Any]) -> Any:
    return kind("5/minute", table="uploads")


def run(call: Callable[[], Any]) -> object:
    return asyncio.run(call())


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "token, a number": (lambda: ServerStore(URL, token=5), "the token for .* is not text"),
    "token, bytes": (lambda: ServerStore(URL, token=b"s3cret"), "the token for .* is not text"),
    "tls, a file": (lambda: ServerStore(URL, tls="cert.pem"), "tls is .*ssl.create_default_context"),
    "transport, a URL": (
        lambda: ServerStore(URL, transport=URL),
        "transport is a transport of httpx, not a URL",
    ),
    "client, for threads": (lambda: RedisKV(redis.Redis()), "client is a redis.asyncio.Redis"),
    "client, a URL": (
        lambda: RedisKV("redis://:s3cret@db"),
        r"client is a redis.asyncio.Redis .*, not a URL",
    ),
    "prefix": (lambda: RedisKV(redis.asyncio.Redis(), prefix=5), "prefix is text, not 5"),
    "Redis URL, a number": (lambda: RedisKV.from_url(5), "the URL of a Redis server is text, not 5"),
    "Redis URL, half an address": (lambda: RedisKV.from_url("redis://[::1"), "Redis URL: "),
    "Redis timeout": (lambda: RedisKV.from_url("redis://db", timeout="2"), "a deadline is .*, not '2'"),
    "Cloudflare timeout": (lambda: CloudflareKV("a", "n", "t", timeout="2"), "a deadline is .*, not '2'"),
    "Cloudflare deadline": (
        lambda: CloudflareKV("a", "n", "t", deadline=math.nan),
        "a deadline is .*, not nan",
    ),
    "Cloudflare transport": (
        lambda: CloudflareKV("a", "n", "t", transport=httpx.HTTPTransport()),
        "transport is one of httpx for coroutines",
    ),
    "Cloudflare base": (lambda: CloudflareKV("a", "n", "t", api_base=5), "api_base is text, not 5"),
    "registry": (lambda: PrometheusHook("x"), "registry is a CollectorRegistry"),
    "registry, the class": (lambda: PrometheusHook(CollectorRegistry), "registry is a CollectorRegistry"),
    "registry of shadows": (lambda: ShadowHook(None), "registry is a CollectorRegistry"),
    "top_keys, text": (lambda: prometheus(top_keys="10"), "top_keys must be a whole number"),
    "top_keys, negative": (lambda: prometheus(top_keys=-1), "top_keys must be a whole number"),
    "histogram, a number": (lambda: prometheus(buckets=5), r"buckets is a list like \[0.001"),
    "histogram, text": (lambda: prometheus(buckets="12"), r"buckets is a list like \[0.001"),
    "capacity": (lambda: TopKeys(0), "capacity must be a whole number from 1"),
    "number of keys": (lambda: TopKeys[str](1).top(-1), "number must be a whole number from 0"),
    "meter_provider": (lambda: OpenTelemetryHook(meter_provider=5), "meter_provider is a MeterProvider"),
    "tracer_provider": (lambda: OpenTelemetryHook(tracer_provider=5), "tracer_provider is a TracerProvider"),
    "path, none": (lambda: load_policy(None), "the path of a policy is text or a pathlib.Path, not None"),
    "path, bytes": (lambda: load_policy(b"x.toml"), "the path of a policy is text or a pathlib.Path"),
    "live path": (lambda: LivePolicy.from_file(None), "the path of a policy is text or a pathlib.Path"),
    "async live path": (
        lambda: AsyncLivePolicy.from_file(5),
        "the path of a policy is text or a pathlib.Path",
    ),
    "environment": (lambda: parse_policy("", environment=5), "environment is a mapping like os.environ"),
    "tier in a table": (lambda: table(BucketTable).check(None, "ada", tier=5), "a tier is text, not 5"),
    "connection": (lambda: table(BucketTable).check("db", "ada"), "connection is one of psycopg"),
    "connection to clean": (lambda: table(BucketTable).cleanup(None), "connection is one of psycopg"),
    "connection of coroutines": (
        lambda: run(lambda: table(AsyncBucketTable).check(None, "ada")),
        "connection is an AsyncConnection of psycopg, or one of asyncpg",
    ),
    "connection of coroutines to clean": (
        lambda: run(lambda: table(AsyncBucketTable).cleanup(None)),
        "connection is an AsyncConnection of psycopg, or one of asyncpg",
    ),
    "start of a clock, not a number": (lambda: FakeClock(math.nan), "a time is a number of seconds, not nan"),
    "start of a clock, endless": (lambda: FakeClock(math.inf), "a time is a number of seconds, not inf"),
    "start of a clock, text": (lambda: FakeClock("5"), "a time is a number of seconds, not '5'"),
    "time that passes": (lambda: FakeClock().advance(-math.inf), "a time is a number of seconds, not -inf"),
    "microseconds that pass": (lambda: FakeClock().advance_us("1"), "a time is whole microseconds, not '1'"),
    "microseconds to go to": (lambda: FakeClock().set_us(1.5), "a time is whole microseconds, not 1.5"),
}


NOT_NUMBERS: tuple[Any, ...] = (True, False, math.nan, "1")
NOT_POSITIVE: tuple[Any, ...] = (*NOT_NUMBERS, -1, -0.5, -math.inf, math.inf)
RATE, PLACES = Limiter("5/minute"), Limiter(concurrent(5, lease="60s"))


def awaited(call: Callable[[AsyncLimiter], Any], *rules: str) -> object:
    async def main() -> object:
        return await call(AsyncLimiter(*rules))

    return asyncio.run(main())


def middleware(**options: Any) -> object:
    return RateLimitMiddleware(None, "5/minute", **options)  # type: ignore[misc]


def table_of_five() -> Any:
    return table(BucketTable)


NUMBERS: dict[str, tuple[Callable[[Any], object], tuple[Any, ...]]] = {
    "now without rules": (lambda value: Limiter().hit("a", now=value), NOT_POSITIVE),
    "now of a settlement": (lambda value: RATE.hold("a").settle(0, now=value), NOT_POSITIVE),
    "now of a release": (lambda value: RATE.hold("a").release(now=value), NOT_POSITIVE),
    "now of a confirmation": (lambda value: RATE.hold("a").confirm(now=value), NOT_POSITIVE),
    "now of a renewal": (lambda value: PLACES.hold("a").renew(now=value), NOT_POSITIVE),
    "now of a request": (lambda value: RATE.request("hit", "a", now=value), NOT_POSITIVE),
    "timeout": (lambda value: RATE.wait("b", timeout=value), NOT_NUMBERS),
    "timeout in a task": (
        lambda value: awaited(lambda each: each.wait("a", timeout=value), "5/minute"),
        NOT_NUMBERS,
    ),
    "timeout without rules": (lambda value: Limiter().wait("a", timeout=value), NOT_NUMBERS),
    "cost without rules": (lambda value: Limiter().hit("a", value), NOT_POSITIVE),
    "cost of a coroutine without rules": (
        lambda value: awaited(lambda each: each.hit("a", value)),
        NOT_POSITIVE,
    ),
    "deadline in memory": (lambda value: Limiter("5/minute", deadline=value), NOT_POSITIVE),
    "deadline in memory of tasks": (lambda value: AsyncLimiter("5/minute", deadline=value), NOT_POSITIVE),
    "deadline without rules": (lambda value: Limiter(deadline=value), NOT_POSITIVE),
    "deadline on Redis": (
        lambda value: Limiter("5/minute", name="x", store="redis://db", deadline=value),
        NOT_POSITIVE,
    ),
    "deadline of a memory store": (lambda value: open_store("memory://", deadline=value), NOT_POSITIVE),
    "quotas_for": (
        lambda value: Limiter("5/minute", quotas=lambda key, tier: None, quotas_for=value),
        (*NOT_POSITIVE, None),
    ),
    "quotas_for without quotas": (lambda value: Limiter("5/minute", quotas_for=value), NOT_POSITIVE),
    "quota_for": (lambda value: middleware(quota=lambda scope: None, quota_for=value), NOT_POSITIVE),
    "quota_for without a quota": (lambda value: middleware(quota_for=value), NOT_POSITIVE),
    "cost of a request": (lambda value: middleware(cost=value), NOT_POSITIVE),
    "statuses that count": (lambda value: middleware(count=[value]), (*NOT_POSITIVE, 99, 600)),
    "share": (lambda value: local(share=value), (*NOT_NUMBERS, None, 0, -1, 1.01, math.inf)),
    "timeout of a file": (lambda value: SQLiteStore(":memory:", timeout=value), NOT_POSITIVE),
    "max_keys": (lambda value: MemoryStore(max_keys=value), (*NOT_POSITIVE, 0, 10**400)),
    "max_notes": (lambda value: MemoryStore(max_notes=value), NOT_POSITIVE),
    "lease": (lambda value: concurrent(5, lease=value), (*NOT_POSITIVE, None, [60], 10**400)),
    "hops": (lambda value: by_address(hops=value), NOT_POSITIVE),
    "ipv6_prefix": (lambda value: by_address(ipv6_prefix=value), NOT_POSITIVE),
    "batch": (lambda value: table_of_five().cleanup(None, batch=value), NOT_POSITIVE),
    "microseconds": (lambda value: FakeClock().set_us(value), (*NOT_NUMBERS, 0.5)),
}


@pytest.mark.parametrize("argument", NUMBERS)
def test_invalid_number_is_refused(argument: str) -> None:
    call, values = NUMBERS[argument]
    for value in values:
        with pytest.raises(ConfigError, match=re.escape(repr(value))):
            call(value)


@pytest.mark.parametrize("wrong", WRONG)
def test_error_names_the_invalid_argument(wrong: str) -> None:
    make, message = WRONG[wrong]
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("secrets", ["s3cret", ["s3cret", 5], 5, None], ids=repr)
def test_error_does_not_show_invalid_secrets(secrets: Any) -> None:
    with pytest.raises(ConfigError, match="secrets is a list of texts") as caught:
        RedactingFilter(secrets)
    assert str(caught.value) == "secrets is a list of texts, like ['s3cret']"
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("text", [b"password = 's3cret'", None], ids=repr)
def test_error_does_not_show_an_invalid_policy(text: Any) -> None:
    with pytest.raises(ConfigError, match=r"parse_policy takes text, not \w+; load_policy reads a file$"):
        parse_policy(text)
