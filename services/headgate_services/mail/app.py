"""The application, its start-up checks and its commands."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from sqlalchemy.exc import IntegrityError

import headgate
from headgate import StoreError, StoreMisconfigured
from headgate.clock import Clock
from headgate_services.common.databases import FAILURES, problem_with
from headgate_services.common.guards import SizeGuard, answer_invalid
from headgate_services.common.health import add_health, add_metrics
from headgate_services.common.settings import SettingsError
from headgate_services.common.starting import Program, blocking
from headgate_services.common.workers import report_separate_counts
from headgate_services.mail.config import DEMO_DOMAIN, MEGABYTE, Settings, load_settings
from headgate_services.mail.guards import ApiKeyGuard
from headgate_services.mail.providers import EmailProvider
from headgate_services.mail.rate_limiter import GlobalRateLimiter
from headgate_services.mail.routes import api, demo_api
from headgate_services.mail.services import Services, build_limiter, build_services
from headgate_services.mail.storage.database import MailDatabase
from headgate_services.mail.storage.queries import inbox_of_address

logger = logging.getLogger(__name__)

_RETRY = {"Retry-After": "1"}  # seconds; the return of a store is detected within one


def create_app(
    settings: Settings | None = None,
    *,
    clock: Clock | None = None,
    provider: EmailProvider | None = None,
) -> FastAPI:
    """Create the application.

    Args:
        settings: The settings; by default read from the environment.
        clock: A clock for tests.
        provider: A provider to use instead of the configured one.

    Raises:
        SettingsError: A setting is invalid; the message names the variable.
    """
    settings = load_settings() if settings is None else settings
    services = build_services(settings, clock, provider)
    if services.provider is None:
        logger.warning("Nothing can be sent: %s not set", ", ".join(settings.missing_credentials))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        report_separate_counts("mail", settings.separate_counts)
        async with aclosing(services):
            await _prepare(services)
            yield

    app = FastAPI(title="Headgate mail", version=headgate.__version__, lifespan=lifespan)
    app.state.services = services
    app.include_router(api)
    if settings.email_provider == "demo":
        app.include_router(demo_api)
    add_metrics(app, services.metrics.render)
    add_health(app, {"database": services.database.ping, "rate_limit_store": services.limiter.usage})
    app.add_exception_handler(StoreError, _store_unavailable)
    for failure in FAILURES:
        app.add_exception_handler(failure, _database_unavailable)
    app.add_exception_handler(RequestValidationError, answer_invalid)
    _add_guards(app, settings)
    return app


def _add_guards(app: FastAPI, settings: Settings) -> None:
    """Add the middleware, innermost first. CORS is the outermost, so that browsers can read every refusal."""
    # Base64 encodes three bytes as four; one more megabyte is for the rest of the request.
    app.add_middleware(SizeGuard, max_bytes=(settings.attachment_max_total_size_mb * 4 // 3 + 2) * MEGABYTE)
    if key := settings.api_key.get_secret_value():
        app.add_middleware(ApiKeyGuard, key=key)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.cors_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=[
            "Retry-After",
            "RateLimit",
            "RateLimit-Policy",
            "X-RateLimit-Limit",
            "X-RateLimit-Remaining",
            "Idempotency-Replayed",
        ],
    )


async def _store_unavailable(request: Request, error: Exception) -> JSONResponse:
    """Answer 503: nothing is sent while the count is unknown."""
    logger.error("Rate limit store unavailable: %s", error)
    return JSONResponse({"detail": "Rate limit store unavailable; nothing was sent"}, 503, _RETRY)


async def _database_unavailable(request: Request, error: Exception) -> JSONResponse:
    """Answer 503: nothing was sent or stored for this request."""
    logger.error("Database unavailable: %s", problem_with(error))
    return JSONResponse({"detail": "Database unavailable; nothing was sent or stored"}, 503, _RETRY)


async def _prepare(services: Services) -> None:
    """Apply missing migrations, and create the inbox of the demo provider."""
    await services.database.migrate()
    if services.settings.email_provider != "demo":
        return
    address = f"demo@{DEMO_DOMAIN}"
    async with services.database.reading() as session:
        exists = await inbox_of_address(session, address)
    if exists:
        return
    try:
        await services.add_inbox(address, "Demo")
    except IntegrityError:  # another worker created it
        logger.debug("The demo inbox exists already")


@blocking
async def inspect_limit() -> str:
    """Return the counts of the send limit in one line.

    Raises:
        SettingsError: The counts are in the memory of the service.
        StoreError: The store does not reply.
    """
    async with _send_limit() as limiter:
        windows = (await limiter.usage()).windows
    return ", ".join(map(str, windows)) or "nothing is limited"


@blocking
async def reset_limit() -> None:
    """Clear the counts of the send limit; raises like `inspect_limit`."""
    async with _send_limit() as limiter:
        await limiter.reset()


def _send_limit() -> aclosing[GlobalRateLimiter]:
    """Return the limiter of the service, for a command."""
    settings = load_settings()
    if settings.separate_counts:
        raise SettingsError(
            "RATE_LIMIT_STORE: counts in the memory of the service cannot be reached by a command; use a shared store, like redis://localhost"
        )
    return aclosing(build_limiter(settings))


async def _check_database(settings: Settings) -> None:
    """Connect to the database and apply missing migrations.

    The application does this too, but an error inside the server would be a traceback.
    """
    async with aclosing(MailDatabase(settings.sqlalchemy_url(), settings.database_timeout)) as database:
        await database.prepare()


async def _check_store(settings: Settings) -> None:
    """Fail if the store is misconfigured. If it is only down, start anyway; nothing is sent until it is back."""
    async with aclosing(build_limiter(settings)) as limiter:
        try:
            await limiter.ping()
        except StoreMisconfigured as error:
            raise SettingsError(f"RATE_LIMIT_STORE: {error}") from error
        except StoreError as error:
            logger.warning("Rate limit store unavailable: %s", error)


PROGRAM = Program(
    "headgate_services.mail.app:PROGRAM", load_settings, create_app, (_check_database, _check_store)
)
main = PROGRAM.main
