"""The demo itself: services, server, stand-ins and callers in one event loop, on a Redis and a PostgreSQL that run.

Heavy to import: all of it is what `headgate demo` waits for while the servers start.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx

from headgate.stores.postgres import migrate
from headgate_server import BoundedProtocol, open_app
from headgate_services.demo.customers import Customers
from headgate_services.demo.hosting import Hosted
from headgate_services.demo.logs import log_problems
from headgate_services.demo.ports import listen_near
from headgate_services.demo.services import PAGES, PORTS, demo_settings, make_service
from headgate_services.demo.stand_ins import BotApiStandIn, MailSink
from headgate_services.demo.traffic import DemoTraffic
from headgate_services.demo.visitors import Visitors
from headgate_services.telegram.webhook import REFUSAL
from headgate_services.tiers.config import TiersSettings
from headgate_services.tiers.keys import KeyTable

__all__ = ["Scene", "Stage", "playing"]

_ANSWER_SECONDS = 10.0
_CONNECTIONS = 4
_INBOX = {"name": "Newsletter", "email_username": "newsletter"}
_TIERS = ("free", "plus", "pro")


@dataclass(frozen=True, slots=True)
class Stage:
    """What there must be before the demo can run.

    Attributes:
        host: Where everything listens.
        port: Where the dashboard should.
        open_traffic: Whether the callers call from the start.
        folder: Where files go.
        redis_url: Where Redis is, without a database.
        postgres_url: Where PostgreSQL is.
    """

    host: str
    port: int
    open_traffic: bool
    folder: Path
    redis_url: str
    postgres_url: str


@dataclass(frozen=True, slots=True)
class Scene:
    """What runs.

    Attributes:
        dashboard: The server.
        services: The four services.
        policy: The policy file that the server reads again when it changes.
        api_key: A key for the tiers service, of a user who does nothing but try it.
        submitter_id: A submitter for the petitions service, likewise.
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
    """What the dashboard shows of the demo, and its switch. Filled in when everything runs."""

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
async def playing(stage: Stage) -> AsyncIterator[Scene]:
    """Run the demo for as long as the block lasts.

    Raises:
        DemoError: Something does not start; if it is a service, the log says why.
    """
    log_problems()
    async with AsyncExitStack() as stack:
        mail_sink, bot_api = MailSink(), BotApiStandIn(REFUSAL)
        stack.push_async_callback(mail_sink.stop)
        await mail_sink.start()
        telegram = Hosted("Bot API", bot_api, listen_near("127.0.0.1", 0))
        settings = demo_settings(
            stage.folder, stage.redis_url, stage.postgres_url, mail_sink.port, telegram.url
        )
        services = {name: _service(name, settings[name], stage) for name in PORTS}
        page = _Page(services)
        policy = await asyncio.to_thread(_prepare_policy, stage)
        dashboard = _dashboard(policy, stage, page)
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
        traffic = page.running_traffic = DemoTraffic(callers, on=stage.open_traffic)
        stack.push_async_callback(_cancelled, asyncio.create_task(traffic.run()))
        yield Scene(dashboard, tuple(services.values()), policy, keys["you"], str(uuid4()), traffic)


def _service(name: str, variables: Mapping[str, str], stage: Stage) -> Hosted:
    listener = listen_near(stage.host, PORTS[name], {stage.port, *PORTS.values()})
    return Hosted(name, make_service(name, variables), listener)


def _prepare_policy(stage: Stage) -> Path:
    """Write the policy file, and make the tables of the store that needs some."""
    path = stage.folder / "headgate.toml"
    path.write_bytes(resources.files(__package__).joinpath("headgate.toml").read_bytes())
    migrate(stage.postgres_url)
    return path


def _dashboard(policy: Path, stage: Stage, page: _Page) -> Hosted:
    variables = {
        "HEADGATE_STORE__URL": f"{stage.redis_url}/0",
        "HEADGATE_LIMITERS__LLM_TOKENS__STORE": stage.postgres_url,
    }
    server = open_app(policy, environment=variables, demo=page)
    listener = listen_near(stage.host, stage.port)
    return Hosted("dashboard", server, listener, before_stop=server.end_streams, http=BoundedProtocol)


async def _start_all(stack: AsyncExitStack, hosted: list[Hosted]) -> None:
    """Start them together, and have them stopped together."""

    async def stop() -> None:
        await asyncio.gather(*(each.stop() for each in hosted))

    stack.push_async_callback(stop)
    await asyncio.gather(*(each.start() for each in hosted))


async def _api_keys(database_url: str) -> dict[str, str]:
    """Make a key for each tier, and one for the user of the demo."""
    async with aclosing(KeyTable(TiersSettings(database_url=database_url).database)) as table:
        keys = {tier: (await table.create(f"{tier}-user", tier)).key for tier in _TIERS}
        return {**keys, "you": (await table.create("you", "plus")).key}


def _client(url: str) -> httpx.AsyncClient:
    """Return a client of one server, with few connections: httpx looks at all of them for every request."""
    limits = httpx.Limits(max_connections=_CONNECTIONS)
    # Nothing is encrypted here, and reading the certificates of the world would take longer than to start a service.
    return httpx.AsyncClient(
        base_url=url, limits=limits, timeout=_ANSWER_SECONDS, trust_env=False, verify=False
    )


async def _inbox(mail: httpx.AsyncClient) -> str:
    """Return the id of the newsletter's inbox, made anew unless the data was kept from before."""
    listed = (await mail.get("/v1/inboxes")).raise_for_status().json()["items"]
    if not listed:
        listed = [(await mail.post("/v1/inboxes", json=_INBOX)).raise_for_status().json()]
    inbox_id: str = listed[0]["id"]
    return inbox_id


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
