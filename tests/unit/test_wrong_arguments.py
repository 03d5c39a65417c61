"""What a store, a hook or a helper is made of is checked when it is made: a wrong argument is an error that names it."""

# Wrong types are what this is about.
# mypy: disable-error-code="arg-type"

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import redis
import redis.asyncio
from prometheus_client import CollectorRegistry

from headgate import ConfigError
from headgate.client import ServerStore
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
    "time that passes": (lambda: FakeClock().advance(-math.inf), "a time is a number of seconds, not -inf"),
    "microseconds that pass": (lambda: FakeClock().advance_us("1"), "a time is whole microseconds, not '1'"),
    "microseconds to go to": (lambda: FakeClock().set_us(1.5), "a time is whole microseconds, not 1.5"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_argument_is_named(wrong: str) -> None:
    make, message = WRONG[wrong]
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("secrets", ["s3cret", ["s3cret", 5], 5, None], ids=repr)
def test_wrong_secrets_are_not_shown(secrets: Any) -> None:
    with pytest.raises(ConfigError, match="secrets is a list of texts") as caught:
        RedactingFilter(secrets)
    assert str(caught.value) == "secrets is a list of texts, like ['s3cret']"
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("text", [b"password = 's3cret'", None], ids=repr)
def test_a_policy_that_is_no_text_is_not_shown(text: Any) -> None:
    with pytest.raises(ConfigError, match=r"parse_policy takes text, not \w+; load_policy reads a file$"):
        parse_policy(text)
