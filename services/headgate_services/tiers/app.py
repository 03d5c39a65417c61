"""The service: a small API behind the middleware, and its start-up checks."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from redis.asyncio import Redis

import headgate
from headgate import ConfigError, StoreError, StoreMisconfigured
from headgate.clock import Clock
from headgate.http import by_address
from headgate_services.common.health import PATHS, Check, add_health, add_metrics
from headgate_services.common.starting import Program
from headgate_services.common.workers import report_separate_counts
from headgate_services.tiers.authentication import ApiKeyAuthentication
from headgate_services.tiers.config import TiersSettings, load_settings
from headgate_services.tiers.keys import KeyTable
from headgate_services.tiers.limits import ANONYMOUS, limits_by_tier
from headgate_services.tiers.log import log
from headgate_services.tiers.metrics import TierMetrics
from headgate_services.tiers.middleware import (
    EXCLUDED_PATHS,
    RateLimitMiddleware,
    Standing,
    setup_rate_limiting,
)
from headgate_services.tiers.rate_limiter import Backends


def create_app(settings: TiersSettings | None = None, *, clock: Clock | None = None) -> FastAPI:
    """Create the application.

    Args:
        settings: The settings; by default read from the environment.
        clock: A clock for tests.

    Raises:
        ConfigError: A setting is invalid; the message names the variable.
    """
    settings = load_settings() if settings is None else settings
    keys = KeyTable(settings.database_url, timeout=settings.database_timeout)
    metrics = TierMetrics(limits_by_tier(settings.saju_rate_limits))
    client = _client(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        report_separate_counts("tiers", settings.separate_counts)
        try:
            await keys.prepare()
            yield
        finally:
            await keys.aclose()
            if client is not None:
                await client.aclose()

    app = FastAPI(title="Headgate tiers", version=headgate.__version__, lifespan=lifespan)
    app.add_api_route("/", _root)
    stores: dict[str, Check] = {"database": keys.ping}
    if client is not None:
        stores["redis"] = client.ping
    add_health(app, stores)
    add_metrics(app, metrics.text)
    app.add_api_route("/v1/whoami", _whoami)
    if settings.saju_enable_rate_limiting:
        app.add_middleware(
            RateLimitMiddleware,
            redis_client=client,
            rate_limits=settings.saju_rate_limits,
            exclude_paths=(*EXCLUDED_PATHS, *PATHS),
            use_atomic_redis=settings.saju_enable_atomic_rate_limiter,
            address=by_address(proxies=settings.saju_trusted_proxies, header=settings.saju_forwarded_header),
            clock=clock,
            deadline=settings.saju_redis_timeout,
            on_decision=metrics.decided,
        )
    # Added last, so it runs before the limiter, which needs the tier.
    app.add_middleware(ApiKeyAuthentication, keys=keys)
    return app


def _client(settings: TiersSettings) -> Redis | None:
    if not settings.saju_enable_rate_limiting:
        log(logging.WARNING, "Rate limiting is off; set SAJU_ENABLE_RATE_LIMITING=true to switch it on")
        return None
    try:
        return setup_rate_limiting(settings.saju_redis_url, timeout=settings.saju_redis_timeout)
    except ConfigError as error:
        raise ConfigError(f"SAJU_REDIS_URL: {error}") from None


async def _check_database(settings: TiersSettings) -> None:
    """Create the tables. The application does this too, but an error inside the server would be a traceback."""
    async with aclosing(KeyTable(settings.database_url, timeout=settings.database_timeout)) as keys:
        await keys.prepare()


async def _check_redis(settings: TiersSettings) -> None:
    """Fail if Redis is misconfigured. If it is only down, start anyway; each process then limits in its memory."""
    if not settings.saju_enable_rate_limiting or not settings.saju_redis_url:
        return
    client = _client(settings)
    try:
        await Backends(
            client, atomic=settings.saju_enable_atomic_rate_limiter, deadline=settings.saju_redis_timeout
        ).ping()
    except StoreMisconfigured as error:
        raise ConfigError(f"SAJU_REDIS_URL: {error}") from None
    except StoreError as error:
        log(logging.WARNING, "Rate limiting: Redis cannot be reached: %s", error)
    finally:
        if client is not None:
            await client.aclose()


async def _root() -> dict[str, str]:
    """Return the name and version of the service."""
    return {"service": "headgate tiers", "version": headgate.__version__}


async def _whoami(request: Request) -> dict[str, Any]:
    """Return the caller, their tier and the state of their limit."""
    credentials = request.state.credentials
    if credentials == "wrong":
        raise HTTPException(401, "Unknown or revoked API key", {"WWW-Authenticate": "Bearer"})
    if credentials == "unchecked":
        raise HTTPException(503, "API keys cannot be looked up at the moment", {"Retry-After": "1"})
    user = request.state.user
    standing: Standing | None = getattr(request.state, "rate_limit", None)
    known = {"user": user and user.id, "tier": user.tier if user else ANONYMOUS}
    if standing is None:
        return {**known, **dict.fromkeys(("limit", "capacity", "remaining", "reset"))}
    return {
        **known,
        "tier": standing.tier,
        "limit": standing.limit.limit,
        "capacity": standing.limit.capacity,
        "remaining": standing.remaining,
        "reset": standing.outcome.reset_at,
    }


PROGRAM = Program(
    "headgate_services.tiers.app:PROGRAM", load_settings, create_app, (_check_database, _check_redis)
)
main = PROGRAM.main
