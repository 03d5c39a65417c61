"""Rate limits for any ASGI application.

    app = RateLimitMiddleware(app, redis_client=setup_rate_limiting("redis://localhost:6379/0"), use_atomic_redis=True)

Every response has `X-RateLimit-Limit`, `-Remaining` and `-Reset`; refusals have `Retry-After` too. The values are those of
the decision. If the application raises before it responds, the middleware answers 500 with these fields and raises the error
again, for the log.

Requests are limited by `request.state.user`, which an outer middleware must set, or else by the client's address.
`exclude_paths` and everything but HTTP are not limited.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import floor
from typing import Any, NamedTuple

import redis
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from headgate import ConfigError
from headgate.clock import Clock
from headgate.http import Answer, by_address, problem
from headgate.http.asgi import App, Message, Receive, Scope, Send, respond
from headgate.urls import check_credentials
from headgate_services.tiers.bucket import Outcome
from headgate_services.tiers.config import atomic_by_environment
from headgate_services.tiers.limits import (
    ANONYMOUS,
    DEFAULT_RATE_LIMITS,
    SIGNED_IN,
    WINDOW,
    TierLimit,
    limits_by_tier,
)
from headgate_services.tiers.log import LimitedLog, _redact_redis_credentials, log
from headgate_services.tiers.rate_limiter import DEADLINE, Backends

__all__ = [
    "DEFAULT_RATE_LIMITS",
    "RateLimitExceeded",
    "RateLimitMiddleware",
    "Standing",
    "_redact_redis_credentials",
    "setup_rate_limiting",
]

EXCLUDED_PATHS = ("/health", "/metrics", "/")
MOST_CONNECTIONS = 50
_SHOWN = 4
"""Characters of a user id in the log."""


_RFC_6585 = "https://datatracker.ietf.org/doc/html/rfc6585#section-4"
_OURS = frozenset({b"x-ratelimit-limit", b"x-ratelimit-remaining", b"x-ratelimit-reset"})
_SERVER_ERROR = Answer(
    500,
    [(b"content-length", b"21"), (b"content-type", b"text/plain; charset=utf-8")],
    b"Internal Server Error",
)


class RateLimitExceeded(Exception):
    """A refusal. Applications may raise it for their own limits; the middleware sends the same 429.

    Attributes:
        limit: Requests per window.
        window: The window in seconds.
        retry_after: Whole seconds until another request is allowed.
        message: The message for the client.
    """

    def __init__(
        self, limit: int, window: int = WINDOW, retry_after: int = 1, message: str | None = None
    ) -> None:
        self.limit = limit
        self.window = window
        self.retry_after = retry_after
        self.message = message or f"Rate limit exceeded. Please retry after {retry_after} seconds."
        super().__init__(self.message)

    def answer(self, path: str) -> Answer:
        """Return the response: status 429 (RFC 6585) with a problem body."""
        members = {
            "instance": path,
            "limit": self.limit,
            "window": self.window,
            "retry_after": self.retry_after,
        }
        return problem(429, self.message, kind=_RFC_6585, members=members, retry_after=self.retry_after)


class Standing(NamedTuple):
    """The limit and the decision of a request; the middleware sets it as `request.state.rate_limit`."""

    tier: str
    limit: TierLimit
    outcome: Outcome

    @property
    def remaining(self) -> int:
        """Remaining requests, rounded down."""
        return floor(self.outcome.remaining)

    def fields(self) -> list[tuple[bytes, bytes]]:
        """Return the header fields of the response."""
        return [
            (b"x-ratelimit-limit", b"%d" % self.limit.limit),
            (b"x-ratelimit-remaining", b"%d" % self.remaining),
            (b"x-ratelimit-reset", b"%d" % self.outcome.reset_at),
        ]


@dataclass(frozen=True, slots=True)
class Identity:
    """The key and the tier of a request."""

    key: str
    tier: str


class RateLimitMiddleware:
    """Takes a token for every request, and refuses requests without one.

    Args:
        app: The application.
        redis_client: The Redis client, from `setup_rate_limiting`; without it, buckets are in this process.
        rate_limits: Requests per minute by tier, as numbers or `TierLimit`s; by default `DEFAULT_RATE_LIMITS`.
        exclude_paths: Exact paths that are not limited; by default `/health`, `/metrics` and `/`.
        use_atomic_redis: Whether to use the script; by default the value of `SAJU_ENABLE_ATOMIC_RATE_LIMITER`.
        address: Returns the client's address; behind proxies `headgate.http.by_address(proxies=["10.0.0.0/8"])`.
        clock: A clock for tests.
        deadline: Time limit for a reply of Redis, in seconds.
        on_decision: Called with the standing of each request.
    """

    def __init__(
        self,
        app: App,
        *,
        redis_client: Redis | None = None,
        rate_limits: Mapping[str, int | TierLimit] | None = None,
        exclude_paths: Collection[str] | None = None,
        use_atomic_redis: bool | None = None,
        address: Callable[[Any], str] | None = None,
        clock: Clock | None = None,
        deadline: float = DEADLINE,
        on_decision: Callable[[Standing], None] | None = None,
    ) -> None:
        self.app = app
        self.limits = limits_by_tier(rate_limits)
        atomic = atomic_by_environment() if use_atomic_redis is None else use_atomic_redis
        self.backends = Backends(redis_client, atomic=atomic, clock=clock, deadline=deadline)
        self._buckets = {tier: limit.bucket() for tier, limit in self.limits.items()}
        self._excluded = frozenset(EXCLUDED_PATHS if exclude_paths is None else exclude_paths)
        self._address = by_address() if address is None else address
        self._on_decision = on_decision
        self._log_refusal = LimitedLog("60/minute")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._excluded:
            await self.app(scope, receive, send)
            return
        standing = await self.decide(scope)
        scope.setdefault("state", {})["rate_limit"] = standing
        response = _Response(send, standing.fields())
        try:
            if not standing.outcome.allowed:
                raise RateLimitExceeded(standing.limit.limit, WINDOW, standing.outcome.retry_after)
            await self.app(scope, receive, response.send)
        except RateLimitExceeded as refusal:
            if response.started:
                raise
            await respond(scope, receive, response.send, refusal.answer(scope["path"]))
        except Exception:  # an error of the application
            if not response.started:
                await respond(scope, receive, response.send, _SERVER_ERROR)
            raise

    async def decide(self, scope: Scope) -> Standing:
        """Take a token for a request."""
        who = self.identify(scope)
        outcome = await self.backends.take(self._buckets[who.tier], who.key, 1)
        standing = Standing(who.tier, self.limits[who.tier], outcome)
        if not outcome.allowed:
            self._log_refusal(
                logging.INFO,
                "Rate limit exceeded: %s from %s, tier %s, %d per minute; retry after %d s",
                _shortened(who.key),
                self._address(scope),
                who.tier,
                standing.limit.limit,
                outcome.retry_after,
            )
        if self._on_decision is not None:
            self._on_decision(standing)
        return standing

    def identify(self, scope: Scope) -> Identity:
        """Return the key and tier of a request. User ids have the prefix `user:`, so they cannot look like addresses."""
        user = scope.get("state", {}).get("user")
        if user is None:
            return Identity(f"ip:{self._address(scope)}", ANONYMOUS)
        tier = _attribute(user, "tier") or SIGNED_IN
        user_id = _attribute(user, "id")
        key = f"ip:{self._address(scope)}" if user_id is None else f"user:{user_id}"
        return Identity(key, tier if tier in self.limits else ANONYMOUS)


class _Response:
    """Adds header fields to a response."""

    def __init__(self, send: Send, fields: list[tuple[bytes, bytes]]) -> None:
        self.started = False
        self._send = send
        self._fields = fields

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            others = [field for field in message.get("headers", ()) if field[0].lower() not in _OURS]
            message = {**message, "headers": [*others, *self._fields]}
        await self._send(message)


def setup_rate_limiting(redis_url: str | None, *, timeout: float = DEADLINE) -> Redis | None:
    """Create the client for the middleware; `None` without a URL. It blocks while it tries to connect.

    If Redis is down, a warning is logged and the client is still returned; it is used as soon as Redis replies.

    Raises:
        ConfigError: The URL is not a Redis URL.
    """
    if not redis_url:
        log(logging.INFO, "Rate limiting: Redis URL not provided, using local fallback")
        return None
    check_credentials(redis_url)
    try:
        # No retries: after a lost reply it is unknown whether a token was taken.
        pool = BlockingConnectionPool.from_url(
            redis_url,
            max_connections=MOST_CONNECTIONS,
            timeout=timeout,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),
        )
        probe = redis.Redis.from_url(redis_url, socket_timeout=timeout, socket_connect_timeout=timeout)
    except ValueError:  # the message may contain parts of the URL
        raise ConfigError("is not a URL like redis://user@host:6379/0") from None
    try:
        with probe:
            probe.ping()
    except redis.RedisError as error:
        problem = "Rate limiting: Redis at %s does not reply; limits are local until it does: %s"
        log(logging.WARNING, problem, redis_url, error)
    else:
        log(logging.INFO, "Rate limiting: Connected to Redis at %s", redis_url)
    return Redis.from_pool(pool)


def _shortened(key: str) -> str:
    """Shorten the user id of a key for the log, because it may be an e-mail address."""
    kind, _, name = key.partition(":")
    return key if kind == "ip" or len(name) <= _SHOWN else f"{kind}:{name[:_SHOWN]}…"


def _attribute(user: Any, name: str) -> Any:
    return user.get(name) if isinstance(user, Mapping) else getattr(user, name, None)
