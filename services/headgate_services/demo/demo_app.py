"""The demo: services, server and callers in one event loop, with a running Redis and PostgreSQL.

Slow to import, so `headgate demo` imports it while the servers start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx

from headgate import Limiter
from headgate.stores.postgres import migrate
from headgate_server import BoundedProtocol, open_app
from headgate_services.common.databases import database_url
from headgate_services.demo.bot_api import BotApiStandIn
from headgate_services.demo.callers import Customers, Visitors
from headgate_services.demo.hosting import Hosted, listen_near
from headgate_services.demo.services import PAGES, PORTS, demo_settings, make_service
from headgate_services.demo.traffic import DemoTraffic
from headgate_services.petitions.logs import configure_logging
from headgate_services.telegram.webhook import REFUSAL
from headgate_services.tiers.keys import KeyTable

__all__ = ["DemoOptions", "RunningDemo", "running_demo"]

_ANSWER_SECONDS = 10.0
_CONNECTIONS = 4
_TIERS = ("free", "plus", "pro")


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of the demo.

    Attributes:
        host: The address that everything listens on.
        port: The preferred port of the dashboard.
        open_traffic: Whether the callers are on at the start.
        folder: The folder for files.
        redis_url: The URL of Redis, without a database.
        postgres_url: The URL of PostgreSQL.
    """

    host: str
    port: int
    open_traffic: bool
    folder: Path
    redis_url: str
    postgres_url: str


@dataclass(frozen=True, slots=True)
class RunningDemo:
    """A demo that runs.

    Attributes:
        dashboard: The server.
        services: The four services.
        policy: The policy file; the server reloads it when it changes.
        api_key: A key of the tiers service for the user of the demo.
        submitter_id: A submitter of the petitions service for the user of the demo.
        traffic: The callers.
    """

    dashboard: Hosted
    services: tuple[Hosted, ...]
    policy: Path
    api_key: str
    submitter_id: str
    traffic: DemoTraffic


@dataclass(slots=True)
class _Page:
    """The part of the dashboard about the demo, with the traffic switch."""

    hosted: Mapping[str, Hosted]
    running_traffic: DemoTraffic | None = None
    visitors: Visitors | None = None

    @property
    def traffic(self) -> bool:
        return self.running_traffic is not None and self.running_traffic.on

    @traffic.setter
    def traffic(self, on: bool) -> None:
        if self.running_traffic is not None:
            self.running_traffic.on = on

    def services(self) -> list[dict[str, Any]]:
        if self.visitors is None:
            return []
        rows = [(name, hosted.url, self.visitors.tally(name)) for name, hosted in self.hosted.items()]
        return [
            {"name": name, "url": url + PAGES[name], "sent": tally.sent, "refused": tally.refused}
            for name, url, tally in rows
        ]


@asynccontextmanager
async def running_demo(options: DemoOptions) -> AsyncIterator[RunningDemo]:
    """Run the demo during the block.

    Raises:
        DemoError: A part of the demo does not start; for a service, the log has the reason.
    """
    _log_problems()
    async with AsyncExitStack() as stack:
        bot_api = BotApiStandIn(REFUSAL)
        telegram = Hosted("Bot API", bot_api.app, listen_near("127.0.0.1", 0))
        settings = demo_settings(options.folder, options.redis_url, options.postgres_url, telegram.url)
        services = {name: _service(name, settings[name], options) for name in PORTS}
        page = _Page(services)
        policy = await asyncio.to_thread(_prepare_policy, options)
        dashboard = _dashboard(policy, options, page)
        await _start_all(stack, [telegram, *services.values(), dashboard])

        clients = {
            name: await stack.enter_async_context(_client(each.url)) for name, each in services.items()
        }
        keys = await _api_keys(settings["tiers"]["DATABASE_URL"])
        page.visitors = Visitors(
            clients,
            await _inbox(clients["mail"]),
            {tier: keys[tier] for tier in _TIERS},
            settings["telegram"]["TELEGRAM_WEBHOOK_SECRET"],
            bot_api,
        )
        customers = Customers(await stack.enter_async_context(_client(dashboard.url)))
        callers = [*customers.callers(), *page.visitors.callers()]
        traffic = page.running_traffic = DemoTraffic(callers, on=options.open_traffic)
        stack.push_async_callback(_cancelled, asyncio.create_task(traffic.run()))
        yield RunningDemo(dashboard, tuple(services.values()), policy, keys["you"], str(uuid4()), traffic)


def _service(name: str, variables: Mapping[str, str], options: DemoOptions) -> Hosted:
    listener = listen_near(options.host, PORTS[name], {options.port, *PORTS.values()})
    return Hosted(name, make_service(name, variables), listener)


def _prepare_policy(options: DemoOptions) -> Path:
    """Write the policy file, and create the tables of the PostgreSQL store."""
    path = options.folder / "headgate.toml"
    path.write_bytes(resources.files(__package__).joinpath("headgate.toml").read_bytes())
    migrate(options.postgres_url)
    return path


def _dashboard(policy: Path, options: DemoOptions, page: _Page) -> Hosted:
    variables = {
        "HEADGATE_STORE__URL": f"{options.redis_url}/0",
        "HEADGATE_LIMITERS__LLM_TOKENS__STORE": options.postgres_url,
    }
    server = open_app(policy, environment=variables, demo=page)
    listener = listen_near(options.host, options.port)
    return Hosted("dashboard", server, listener, before_stop=server.end_streams, http=BoundedProtocol)


async def _start_all(stack: AsyncExitStack, hosted: list[Hosted]) -> None:
    """Start the applications together; at the end of the stack they stop together."""

    async def stop() -> None:
        await asyncio.gather(*(each.stop() for each in hosted))

    stack.push_async_callback(stop)
    await asyncio.gather(*(each.start() for each in hosted))


async def _api_keys(database: str) -> dict[str, str]:
    """Create a key for each tier, and one for the user of the demo."""
    async with aclosing(KeyTable(database_url(database))) as table:
        keys = {tier: (await table.create(f"{tier}-user", tier)).key for tier in _TIERS}
        return {**keys, "you": (await table.create("you", "plus")).key}


def _client(url: str) -> httpx.AsyncClient:
    """Return a client of one server, with few connections, because httpx checks all of them for every request."""
    limits = httpx.Limits(max_connections=_CONNECTIONS)
    # Without TLS: loading the certificate store takes longer than starting a service.
    return httpx.AsyncClient(
        base_url=url, limits=limits, timeout=_ANSWER_SECONDS, trust_env=False, verify=False
    )


async def _inbox(mail: httpx.AsyncClient) -> str:
    """Return the id of the inbox that the mail service creates for its demo provider."""
    inbox_id: str = (await mail.get("/v1/inboxes")).raise_for_status().json()["items"][0]["id"]
    return inbox_id


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def _log_problems() -> None:
    """Log problems to standard error, each in one line, and repeated ones only a few times a minute."""
    configure_logging("WARNING", _format_problem)
    # Most warnings of the services are about refusals, which are intended here.
    logging.getLogger("headgate_services").setLevel(logging.ERROR)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    limiter = Limiter("2/minute")
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: bool(limiter.hit(f"{record.pathname}:{record.lineno}")))


def _format_problem(logger: Any, method: str, event: Any) -> str:
    """Return a problem in one line; of a traceback, the last line."""
    texts = [str(part).strip() for part in (event["event"], event.get("exception")) if part]
    return f"headgate demo: {event['logger']}: {': '.join(text.rpartition(chr(10))[2] for text in texts)}"
