"""The bot with a fake Telegram and a fake clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx
import pytest

from headgate.stores.kv import KV, MemoryKV
from headgate.testing import FakeClock
from headgate_services.telegram import ButtonPress, Message, TelegramSettings, create_app
from tests.apps.processes import client_of
from tests.apps.telegram.bot_api_server import Bot, BotApiServer
from tests.unit.kv.cloudflare_server import CloudflareServer
from tests.unit.kv.http_server import served
from tests.unit.kv.redis_server import redis_url

SECRET = "a-webhook-secret_1"
HOUR = 3600
BEGINNING = 1_699_999_200.0  # of an hour

_bot_ids = count(1_000_001)


class RecordingKV(MemoryKV):
    """Records its calls; a swap is recorded as a put."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock=clock)
        self.calls: list[str] = []
        self.ttls: dict[str, int] = {}

    async def get(self, key: str) -> str | None:
        self.calls.append("get")
        return await super().get(key)

    async def put(self, key: str, value: str, ttl: int) -> None:
        self.calls.append("put")
        self.ttls[key] = ttl
        await super().put(key, value, ttl)

    async def swap(self, key: str, expected: str | None, value: str, ttl: int) -> bool:
        if await MemoryKV.get(self, key) != expected:
            return False
        await self.put(key, value, ttl)
        return True

    async def content(self) -> dict[str, str | None]:
        return {key: await MemoryKV.get(self, key) async for key in self.list_keys()}

    async def list_keys(self, prefix: str = "") -> AsyncIterator[str]:
        for key in list(self._entries):
            if key.startswith(prefix) and await MemoryKV.get(self, key) is not None:
                yield key


@dataclass
class Handler:
    """A handler for tests.

    Attributes:
        events: The received events, in order.
        reply: The reply.
        error: An exception to raise instead, or None.
        before: Awaited first, if set.
        entered: Set when the first event arrives.
    """

    events: list[Message | ButtonPress] = field(default_factory=list)
    reply: str | None = None
    error: Exception | None = None
    before: Callable[[], Awaitable[Any]] | None = None
    entered: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, event: Message | ButtonPress) -> str | None:
        self.entered.set()
        if self.before is not None:
            await self.before()
        if self.error is not None:
            raise self.error
        self.events.append(event)
        return self.reply

    @property
    def texts(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Message)]


class Service:
    """The bot as Telegram sees it."""

    def __init__(self, client: httpx.AsyncClient, bot: Bot, handler: Handler) -> None:
        self.client = client
        self.bot = bot
        self.handler = handler

    async def post(self, update: Any, secret: str | None = SECRET) -> httpx.Response:
        """Post what Telegram would: an update, or raw bytes."""
        headers = {} if secret is None else {"X-Telegram-Bot-Api-Secret-Token": secret}
        if isinstance(update, bytes):
            return await self.client.post("/telegram/webhook", content=update, headers=headers)
        return await self.client.post("/telegram/webhook", json=update, headers=headers)

    async def send(self, *updates: Any) -> None:
        """Post updates one after the other, each of which must be taken."""
        for update in updates:
            response = await self.post(update)
            assert (response.status_code, response.json()) == (200, {"ok": True})


Start = Callable[..., Awaitable[Service]]


@pytest.fixture(scope="session")
def bot_api() -> Iterator[tuple[BotApiServer, str]]:
    server = BotApiServer()
    with served(server.app) as address:
        yield server, address


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    with redis_url() as url:
        yield url


@pytest.fixture(scope="session")
def cloudflare_at() -> Iterator[tuple[CloudflareServer, str]]:
    server = CloudflareServer()
    with served(server.app) as address:
        yield server, f"{address}/client/v4"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(BEGINNING)


@pytest.fixture
def kv(clock: FakeClock) -> RecordingKV:
    return RecordingKV(clock)


@pytest.fixture
def token() -> str:
    return f"{next(_bot_ids)}:AAH-secret_part_of_the_token"


@pytest.fixture
def bot(bot_api: tuple[BotApiServer, str], token: str) -> Bot:
    """What Telegram knows of the bot."""
    return bot_api[0].bot(token)


@pytest.fixture
def make_settings(bot_api: tuple[BotApiServer, str], token: str) -> Callable[..., TelegramSettings]:
    def make(**environment: str) -> TelegramSettings:
        usual = {
            "TELEGRAM_BOT_TOKEN": token,
            "TELEGRAM_WEBHOOK_SECRET": SECRET,
            "TELEGRAM_API_BASE": bot_api[1],
            "ALLOWED_USER_IDS": "42, 43",
        }
        return TelegramSettings(**usual | environment)

    return make


@pytest.fixture
async def start(
    make_settings: Callable[..., TelegramSettings],
    bot: Bot,
    kv: RecordingKV,
    clock: FakeClock,
) -> AsyncIterator[Start]:
    """Start the bot with some settings, in memory unless another key-value store is given."""
    async with AsyncExitStack() as stack:

        async def start(
            *,
            kv: KV | None = kv,
            updates_kv: KV | None = None,
            handler: Any = None,
            clock: FakeClock | None = clock,
            **environment: str,
        ) -> Service:
            own = Handler()
            chosen = own if handler is None else handler
            app = create_app(
                make_settings(**environment),
                kv=kv,
                updates_kv=updates_kv,
                handler=None if chosen == "configured" else chosen,
                clock=clock,
            )
            client = await stack.enter_async_context(client_of(app))
            return Service(client, bot, chosen if isinstance(chosen, Handler) else own)

        yield start


@pytest.fixture
async def service(start: Start) -> Service:
    """The bot as it starts without any of the limit's settings."""
    return await start()
