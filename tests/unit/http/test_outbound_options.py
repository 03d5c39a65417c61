"""Options of the HTTP clients, and the pauses that they read from response headers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from headgate import AsyncLimiter, ConfigError, Limiter
from headgate.http import Headers, Writer, by_address
from headgate.http.client import (
    AsyncRateLimitTransport,
    RateLimitAdapter,
    RateLimitTransport,
    asked_pause,
    reported_limits,
)
from headgate.testing import FakeClock

NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("headers", "pause"),
    [
        ({"retry-after": "30"}, 30),
        ({"Retry-After": "30"}, 30),
        ({"X-RateLimit-Remaining": "0", "X-RATELIMIT-RESET": "20"}, 20),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after": "Tue, 14 Nov 2023 22:14:20 GMT"}, 60),
        ({"retry-after": "Tue, 14 Nov 2023 22:14:20"}, 60),
        ({"retry-after": "Tue, 14 Nov 2023 22:00:00 GMT"}, 0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "14 Nov 9999999999999 22:14:20"}, None),
        ({"retry-after": "Fri, 31 Dec 9999 23:59:59 -2999999999993"}, None),
        ({"retry-after": "99999999999"}, 86_400),
        ({"retry-after": "7", "x-ratelimit-remaining": "0", "x-ratelimit-reset": "90"}, 7),
        ({"retry-after": "soon", "x-ratelimit-remaining": "0", "x-ratelimit-reset": "90"}, 90),
        ({"retry-after-ms": "1500", "retry-after": "2"}, 1.5),
        ({"retry-after": "5, 30"}, 30),
        ({"retry-after": "Tue, 14 Nov 2023 22:14:20 GMT, 5, Tue, 14 Nov 2023 22:13:50 GMT"}, 60),
        ({"retry-after": "Tue, 14 Nov 2023 22:14:20 GMT", "date": "Tue, 14 Nov 2023 22:14:10 GMT"}, 10),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "6m0s"}, 360),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "12ms"}, 0.012),
        ({"x-ratelimit-remaining-requests": "1", "x-ratelimit-reset-requests": "12ms"}, None),
        (
            {
                "anthropic-ratelimit-output-tokens-remaining": "0",
                "anthropic-ratelimit-output-tokens-reset": "2023-11-14T22:13:50Z",
            },
            30,
        ),
        ({"ratelimit": '"a";r=0;t=30, "b";r=5;t=90, "c";r=0;t=45'}, 45),
        ({"ratelimit": '"a,;r=0;t=99";r=1;t=30'}, None),
        ({"ratelimit": '"a;r=0;t=30'}, None),
        ({"ratelimit": '"' + r"\"" * 50_000 + "\\"}, None),  # a pattern that tries every quote takes minutes
        ({"ratelimit": '"a";r=0'}, None),
        ({"ratelimit": '"a";r=01;t=30'}, None),
        ({"ratelimit": "limit=100, remaining=0, reset=20"}, 20),
        ({"ratelimit": "limit=100, remaining=10, reset=20"}, None),
        ({"ratelimit-remaining": "0", "ratelimit-reset": "20"}, 20),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "20"}, 20),
        ({"x-rate-limit-remaining": "0", "x-rate-limit-reset": str(int(NOW) + 20)}, 20),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": str((int(NOW) + 20) * 1000)}, 20),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "2023-11-14"}, None),
        ({"x-ratelimit-remaining": "1", "x-ratelimit-reset": "20"}, None),
        ({}, None),
    ],
)
def test_pause_is_read_from_response_headers(headers: dict[str, str], pause: float | None) -> None:
    assert asked_pause(headers, NOW, True) == pause


def test_limits_of_providers_are_read_from_response_headers() -> None:
    openai = {
        "X-RateLimit-Limit-Requests": "5000",
        "X-RateLimit-Remaining-Requests": "4999",
        "X-RateLimit-Reset-Requests": "12ms",
        "x-ratelimit-limit-tokens": "160000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1h6m0.5s",
    }
    assert reported_limits(openai, NOW) == [
        ("requests", 4999, 5000, 0.012),
        ("tokens", 0, 160_000, 3960.5),
    ]
    anthropic = {
        "anthropic-ratelimit-requests-remaining": "7",
        "anthropic-ratelimit-input-tokens-remaining": "1000",
        "anthropic-ratelimit-input-tokens-limit": "40000",
        "anthropic-ratelimit-input-tokens-reset": "2023-11-14T22:13:21+00:00",
        "anthropic-ratelimit-output-tokens-remaining": "many",
        "anthropic-ratelimit-tokens-remaining": "9",
        "anthropic-ratelimit-tokens-reset": "later",
    }
    assert reported_limits(anthropic, NOW) == [
        ("requests", 7, None, None),
        ("tokens", 9, None, None),
        ("input_tokens", 1000, 40_000, 1.0),
    ]


def test_retry_after_is_ignored_unless_the_response_is_a_refusal() -> None:
    assert asked_pause({"retry-after": "30"}, NOW, False) is None


@pytest.mark.parametrize("headers", ["ietf", "x-ratelimit", *(Headers(None, draft) for draft in (6, 7))])
def test_client_understands_headers_that_headgate_writes(headers: Any) -> None:
    clock = FakeClock(NOW)
    limiter = Limiter("2/minute", name="odd;r=0;t=1", store="memory://", clock=clock)
    writer = Writer(limiter.rules, headers)
    seen = []
    for _ in range(3):
        decision = limiter.hit("a")
        written = {name.decode(): value.decode() for name, value in writer.fields(decision, clock.now_us())}
        seen.append(asked_pause(written, NOW, not decision.allowed))
    assert seen[0] is None
    assert seen[1] == 61
    assert seen[2] == 61


async def awaited(request: object) -> str:
    return "k1"


@pytest.mark.parametrize("make", [RateLimitTransport, AsyncRateLimitTransport, RateLimitAdapter])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": "me"}, "key= takes functions of the request, not 'me'"),
        ({"key": by_address}, "key= takes functions of the request: write by_address(…)"),
        ({"key": awaited}, f"key= cannot await: write a plain function instead of {awaited!r}"),
        ({"retries": -1}, "retries must be a whole number from 0 to 1000000, not -1"),
        ({"retries": True}, "retries must be a whole number from 0 to 1000000, not True"),
        ({"max_wait": None}, "max_wait must be a number from 0 to 86400.0, not None"),
        ({"max_wait": "90"}, "max_wait must be a number from 0 to 86400.0, not '90'"),
        ({"max_wait": float("nan")}, "max_wait must be a number from 0 to 86400.0, not nan"),
        ({"jitter": 2}, "jitter must be a number from 0 to 1, not 2"),
        ({"jitter": True}, "jitter must be a number from 0 to 1, not True"),
        ({"methods": "GET"}, "methods is a list like ['GET', 'HEAD'], not 'GET'"),
        ({"methods": None}, "methods is a list like ['GET', 'HEAD'], not None"),
        ({"statuses": 429}, "statuses is a list like [429, 503], not 429"),
        ({"statuses": "429"}, "statuses is a list like [429, 503], not '429'"),
        ({"statuses": ["429"]}, "statuses is a list like [429, 503], not ['429']"),
    ],
    ids=str,
)
def test_invalid_options_are_refused_at_construction(
    make: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make("5/s", **options)
    assert str(caught.value) == message


def test_sync_and_async_transports_cannot_be_mixed() -> None:
    with pytest.raises(ConfigError, match=r"^transport= is an httpx.BaseTransport, not <"):
        RateLimitTransport("5/s", httpx.AsyncHTTPTransport())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^transport= is an httpx.AsyncBaseTransport, not <"):
        AsyncRateLimitTransport("5/s", httpx.HTTPTransport())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a limiter of type Limiter, not <AsyncLimiter"):
        RateLimitTransport(AsyncLimiter("5/s"))  # type: ignore[arg-type]
