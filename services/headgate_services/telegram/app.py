"""The application (`POST /telegram/webhook` and `GET /`) and its commands."""

from __future__ import annotations

import hmac
import logging
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from headgate import AsyncLimiter, ConfigError, StoreMisconfigured, StoreUnavailable
from headgate.clock import Clock, SteadyClock
from headgate.outage import breaker_of
from headgate.stores.kv import KV, ListingKV, open_kv, purge
from headgate.stores.kv.cloudflare import CloudflareKV
from headgate_services.common.health import add_health, add_metrics
from headgate_services.common.metrics import LimiterMetrics
from headgate_services.common.starting import Program, blocking, log_to_stderr
from headgate_services.common.workers import report_separate_counts
from headgate_services.telegram.bot_api import BotApi
from headgate_services.telegram.config import TelegramSettings, load_settings
from headgate_services.telegram.dispatch import Handler, HttpAgent, echo, load_handler
from headgate_services.telegram.polling import UpdatePoller
from headgate_services.telegram.rate_limiter import user_limiter
from headgate_services.telegram.seen import SeenUpdates
from headgate_services.telegram.updates import read_update
from headgate_services.telegram.webhook import OUTCOMES, Webhook

WEBHOOK_PATH = "/telegram/webhook"
_PROBE = "ratelimit:readyz"  # a key that does not exist
SECRET_HEADER = "X-Telegram-Bot-Api-Secret-Token"

_logger = logging.getLogger(__name__)


def create_app(
    settings: TelegramSettings | None = None,
    *,
    kv: KV | None = None,
    updates_kv: KV | None = None,
    handler: Handler | None = None,
    clock: Clock | None = None,
) -> FastAPI:
    """Create the ASGI application.

    Args:
        settings: The settings; by default read from the environment.
        kv: The store of the counts, instead of `RATE_LIMIT_KV`; the caller closes it. The ids of updates are then kept in
            memory, unless `updates_kv` is given.
        updates_kv: The store of the ids of updates, instead of `SEEN_UPDATES_KV`; the caller closes it.
        handler: The handler of messages, instead of `AGENT_URL` or `AGENT_HANDLER`.
        clock: The clock for counts and pauses.

    Raises:
        ConfigError: A setting is missing or invalid.
        StoreUnavailable: The file of the counts cannot be opened.
    """
    settings = load_settings() if settings is None else settings
    closing = AsyncExitStack()
    if kv is None:
        kv = _opened(_open_kv(settings, clock), closing)
        if updates_kv is None:
            updates_kv = _opened(_open_updates_kv(settings), closing)
    webhook, _, metrics = _build(settings, kv, updates_kv, closing, handler, clock)
    app = _application(settings, webhook, closing)
    add_metrics(app, metrics.render)
    add_health(app, {"rate_limit_kv": lambda: kv.get(_PROBE)})
    return app


def _opened(kv: ListingKV, closing: AsyncExitStack) -> KV:
    closing.push_async_callback(kv.aclose)
    return kv


def _build(
    settings: TelegramSettings,
    kv: KV,
    updates_kv: KV | None,
    closing: AsyncExitStack,
    handler: Handler | None = None,
    clock: Clock | None = None,
) -> tuple[Webhook, BotApi, LimiterMetrics]:
    """Create the webhook, its client of the Bot API and its metrics; `closing` closes them."""
    if not settings.allowed_user_ids:
        _logger.warning("ALLOWED_USER_IDS is empty: nobody may use the bot")
    bot = BotApi(settings.telegram_bot_token, api_base=settings.telegram_api_base, clock=clock)
    closing.push_async_callback(bot.aclose)
    metrics = LimiterMetrics("telegram_updates", "Updates of allowed users, by outcome", "outcome", OUTCOMES)
    limiter = user_limiter(settings, kv, clock, [metrics.hook], on_store_error="open")
    closing.callback(breaker_of(limiter.store).stop)
    seen = SeenUpdates(updates_kv)
    closing.callback(seen.stop)
    webhook = Webhook(
        settings.allowed_user_ids,
        limiter,
        bot,
        handler or _handler(settings, clock, closing),
        AsyncLimiter(settings.rate_limit_replies, clock=clock) if settings.rate_limit_replies else None,
        seen,
        metrics.count,
    )
    return webhook, bot, metrics


def _application(settings: TelegramSettings, webhook: Webhook, closing: AsyncExitStack) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        report_separate_counts("telegram", settings.separate_counts)
        async with closing:
            yield

    app = FastAPI(title="Headgate Telegram bot", lifespan=lifespan, openapi_url=None)
    expected = settings.telegram_webhook_secret.encode()

    @app.get("/")
    async def alive() -> PlainTextResponse:
        return PlainTextResponse("OK")

    @app.post(WEBHOOK_PATH)
    async def receive(request: Request) -> Response:
        given = request.headers.get(SECRET_HEADER, "")
        if not hmac.compare_digest(given.encode(), expected):
            return PlainTextResponse("Unauthorized", status_code=401)
        update = read_update(await request.body())
        if update is not None:
            try:
                await webhook.receive(update)
            except Exception:  # handlers may raise anything
                _logger.exception(
                    "update %s could not be dispatched; Telegram will deliver it again", update.update_id
                )
                return PlainTextResponse("Internal Server Error", status_code=500)
        return JSONResponse({"ok": True})

    return app


def _open_kv(settings: TelegramSettings, clock: Clock | None = None) -> ListingKV:
    """Open the key-value store of the counts."""
    if settings.rate_limit_kv.lower().partition(":")[0] != "cloudflare":
        return open_kv(settings.rate_limit_kv)
    make = partial(
        CloudflareKV,
        settings.cloudflare_account_id,
        settings.cloudflare_kv_namespace_id,
        settings.cloudflare_api_token,
        clock=clock,
    )
    return make(api_base=settings.cloudflare_api_base) if settings.cloudflare_api_base else make()


def _open_updates_kv(settings: TelegramSettings) -> ListingKV:
    try:
        return open_kv(settings.updates_kv)
    except (ConfigError, StoreUnavailable) as error:
        raise ConfigError(f"SEEN_UPDATES_KV: {error}") from error


def _handler(settings: TelegramSettings, clock: Clock | None, closing: AsyncExitStack) -> Handler:
    if settings.agent_url:
        agent = HttpAgent(settings.agent_url, timeout=settings.agent_timeout, clock=clock)
        closing.push_async_callback(agent.aclose)
        return agent
    return load_handler(settings.agent_handler) if settings.agent_handler else echo


async def _check_kv(settings: TelegramSettings) -> None:
    """Fail if the store is misconfigured. If it is only down, start anyway."""
    async with aclosing(_open_kv(settings)) as kv:
        try:
            await user_limiter(settings, kv).ping()
        except StoreMisconfigured as error:
            raise ConfigError(f"RATE_LIMIT_KV: {error}") from error
        except StoreUnavailable as error:
            _logger.warning(
                "RATE_LIMIT_KV cannot be reached; messages are not limited until it is back: %s", error
            )


@blocking
async def set_webhook(url: str) -> str:
    """Register the webhook with Telegram, and return Telegram's description of the result.

    Args:
        url: The public address of the service, such as `https://bot.example.org`. The path of the webhook is added if it
            has no path; otherwise it must end with that path.

    Raises:
        ConfigError: The URL is not valid for a webhook, or a setting is missing.
        BotApiError: Telegram refuses, or cannot be reached.
    """
    settings = load_settings()
    parts = urlsplit(url)
    if parts.scheme != "https" or not parts.hostname:
        raise ConfigError(f"{url!r}: Telegram delivers to https:// addresses only")
    if parts.path in ("", "/"):
        url = parts._replace(path=WEBHOOK_PATH).geturl()
    elif not parts.path.endswith(WEBHOOK_PATH):  # a proxy may add a prefix
        raise ConfigError(
            f"{url!r}: the webhook is at {WEBHOOK_PATH} only; leave the path out, or end it with {WEBHOOK_PATH}"
        )
    async with _bot(settings) as bot:
        return await bot.set_webhook(url, settings.telegram_webhook_secret)


@blocking
async def webhook_info() -> str:
    """Return the state of the webhook, one line per field; raises like `set_webhook`."""
    async with _bot(load_settings()) as bot:
        info = await bot.webhook_info()
    return "\n".join(f"{name}: {value or 'none'}" for name, value in info.items())


@blocking
async def delete_webhook() -> str:
    """Remove the webhook, so that updates can be polled; return Telegram's description of the result."""
    async with _bot(load_settings()) as bot:
        return await bot.delete_webhook()


def _bot(settings: TelegramSettings) -> aclosing[BotApi]:
    return aclosing(BotApi(settings.telegram_bot_token, api_base=settings.telegram_api_base))


@blocking
async def poll() -> None:
    """Fetch and process updates until interrupted, for development without a public address.

    Raises:
        ConfigError: A setting is missing or invalid.
        BotApiError: Telegram refuses, for instance because a webhook is set.
    """
    settings = _load_and_log()
    async with AsyncExitStack() as closing:
        kv = _opened(_open_kv(settings), closing)
        updates_kv = _opened(_open_updates_kv(settings), closing)
        webhook, bot, _ = _build(settings, kv, updates_kv, closing)
        _logger.info("polling; Ctrl-C stops")
        await UpdatePoller(bot, webhook, SteadyClock()).run()


@blocking
async def purge_limits() -> int:
    """Clear the counts of all users, and return the number of removed entries."""
    async with aclosing(_open_kv(load_settings())) as kv:
        return await purge(kv, "ratelimit:")


@blocking
async def inspect_user(user_id: str) -> str:
    """Return the count of a user in one line."""
    async with _user_limits() as limiter:
        decision = await limiter.check(user_id)
    limit = decision.limit or 0
    # A check reports the state after one more message.
    left = (decision.remaining or 0) + (1 if decision.allowed else 0)
    line = f"user {user_id}: {limit - left} of {limit} messages, {left} left"
    return line if decision.allowed else f"{line}; again in {math.ceil(decision.retry_after or 0)} s"


@blocking
async def reset_user(user_id: str) -> None:
    """Clear the count of a user."""
    async with _user_limits() as limiter:
        await limiter.reset(user_id)


@asynccontextmanager
async def _user_limits() -> AsyncIterator[AsyncLimiter]:
    """Provide the limiter of the service to a command."""
    settings = load_settings()
    if settings.counts_in_memory:
        raise ConfigError(
            "RATE_LIMIT_KV: counts in the memory of the service cannot be reached by a command; use a shared store, like redis://localhost"
        )
    async with aclosing(_open_kv(settings)) as kv:
        yield user_limiter(settings, kv)


def _load_and_log() -> TelegramSettings:
    log_to_stderr("INFO")  # first, because invalid numbers are logged
    return load_settings()


PROGRAM = Program("headgate_services.telegram.app:PROGRAM", _load_and_log, create_app, (_check_kv,))
main = PROGRAM.main
