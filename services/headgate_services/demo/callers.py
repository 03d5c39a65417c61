"""Callers of the server and of the four services in the demo.

Each calls over HTTP, like a program in any language. Some stop when they are refused, others continue. The services
refuse as their contracts require: with 429, or, for the Telegram bot, with a message to the sender.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import NAMESPACE_DNS, uuid5

import httpx

from headgate_services.demo.bot_api import BotApiStandIn
from headgate_services.demo.traffic import Caller

PEOPLE = (
    "alice", "ben", "chloe", "dilan", "emma", "farid", "grace", "hugo", "ines", "jonas",
    "keiko", "liam", "mina", "noah", "olga", "pablo", "quinn", "rosa", "sven", "tara",
)  # fmt: skip
HOMES = [f"198.51.100.{number}" for number in range(10, 60)]
"""Addresses of people; like all addresses here, from networks reserved for documentation."""

STUFFERS = ["203.0.113.66", "203.0.113.67", "203.0.113.99"]
SCRAPER = "192.0.2.200"

_TIDE_SECONDS = 90.0
_BATCH = 25  # decisions per request of the batch job
_BATCH_SECONDS = 8.0
_NIGHT_SECONDS = 30.0  # frequent callers

WRITERS = {1001: "ada", 1002: "boris", 1003: "carla", 1004: "deniz"}
"""Users of the bot, by their ids at Telegram."""

_TOO_MANY = 429
_CONCERNS = (
    "More benches in the park",
    "A later bus on Fridays",
    "Quieter leaf blowers",
    "A library on Sundays",
)


class Customers:
    """All callers of the server.

    Args:
        client: A client of the server.
    """

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._random = random.Random()
        self._stuffers = itertools.cycle(STUFFERS)

    def callers(self) -> list[Caller]:
        """Return the callers; together they request about 110 decisions a second."""
        return [
            *(Caller(f"people {number}", 10.0, self._person) for number in range(3)),
            Caller("acme, a pro customer", 10.0, lambda: self._hit("api", "acme", "pro")),
            Caller("globex, with a contract", 14.0, lambda: self._hit("api", "globex", "enterprise")),
            Caller("people who sign in", 3.0, lambda: self._hit("login", self._random.choice(HOMES))),
            Caller("a credential stuffer", 9.0, lambda: self._hit("login", next(self._stuffers))),
            Caller("people who search", 8.0, lambda: self._hit("search", self._random.choice(HOMES))),
            Caller("a greedy scraper", 20.0, lambda: self._hit("search", SCRAPER)),
            *(Caller(f"{app}, an LLM client", 1.0, self._chat(app)) for app in ("support-bot", "notebook")),
            Caller("people who export", 1.5, self._export),
            Caller("a nightly batch job", 2.0, self._nightly),
        ]

    async def _person(self) -> None:
        """Call at a rate that rises and falls, so that the chart shows waves."""
        if self._random.random() < 0.6 + 0.4 * math.sin(time.monotonic() * math.tau / _TIDE_SECONDS):
            await self._hit("api", self._random.choice(PEOPLE))

    async def _export(self) -> None:
        """Half of the people are on the pro plan; the others' plan has no exports."""
        person = self._random.randrange(len(PEOPLE))
        key = {"person": PEOPLE[person], "team": f"team-{person % 4}"}
        await self._hit("exports", key, "pro" if person % 2 else "free")

    def _chat(self, app: str) -> Any:
        async def chat() -> None:
            """Hold the estimated tokens, wait for the model, and settle the real number."""
            held = self._random.randrange(1500, 4000)
            answer = await self._post("/v1/limiters/llm-tokens/hold", {"key": app, "cost": held})
            if answer["hold"] is None:
                await asyncio.sleep(min(answer["decision"]["retry_after"] or 1.0, 5.0))
                return
            await asyncio.sleep(self._random.uniform(0.3, 1.5))
            if self._random.random() < 0.05:  # the model did not answer
                await self._post(f"/v1/holds/{answer['hold']}/release", {})
            else:
                used = {"cost": self._random.randrange(200, held)}
                await self._post(f"/v1/holds/{answer['hold']}/settle", used)

        return chat

    async def _nightly(self) -> None:
        """Send batches for some seconds, then pause."""
        if time.monotonic() % _NIGHT_SECONDS < _BATCH_SECONDS:
            calls = [{"limiter": "api", "operation": "hit", "key": "nightly-batch"}] * _BATCH
            await self._post("/v1/batch", {"calls": calls})

    async def _hit(self, limiter: str, key: str | dict[str, str], tier: str | None = None) -> None:
        await self._post(f"/v1/limiters/{limiter}/hit", {"key": key, "tier": tier})

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        response = await self._client.post(path, json=body)
        return response.raise_for_status().json()


@dataclass(slots=True)
class VisitTally:
    """Number of answers of one service, and of refusals among them."""

    sent: int = 0
    refused: int = 0

    def add(self, response: httpx.Response) -> None:
        """Count an answer.

        Raises:
            httpx.HTTPStatusError: The answer is neither a success nor a refusal.
        """
        if response.status_code != _TOO_MANY:
            response.raise_for_status()
        self.sent += 1
        self.refused += response.status_code == _TOO_MANY


class Visitors:
    """All callers of the four services.

    Args:
        clients: A client of each service, by its name.
        inbox_id: The inbox that mail is sent from.
        api_keys: A key for each tier of the tiers service.
        webhook_secret: The secret of the bot's webhook.
        bot_api: The local replacement of the Bot API.
    """

    def __init__(
        self,
        clients: Mapping[str, httpx.AsyncClient],
        inbox_id: str,
        api_keys: Mapping[str, str],
        webhook_secret: str,
        bot_api: BotApiStandIn,
    ) -> None:
        self._clients = clients
        self._inbox_id = inbox_id
        self._api_keys = api_keys
        self._webhook_secret = webhook_secret
        self._bot_api = bot_api
        self._random = random.Random()
        self._update_ids = itertools.count(time.time_ns() // 1_000_000)  # new ones after every start
        self._tallies = {name: VisitTally() for name in clients}

    def tally(self, service: str) -> VisitTally:
        """Return the tally of a service."""
        tally = self._tallies[service]
        if service == "telegram":  # every update is answered with 200; a refusal is a message of the bot
            tally.refused = self._bot_api.refusals
        return tally

    def callers(self) -> list[Caller]:
        """Return the callers; together they send about 20 requests a second."""
        return [
            Caller("a newsletter", 1.4, self._send_mail),
            Caller("people who chat", 1.0, self._chat(list(WRITERS))),
            Caller("somebody who chats without end", 1.5, self._chat([1004])),
            *(Caller(f"{tier} user", 3.0, self._look_up(key)) for tier, key in self._api_keys.items()),
            Caller("anonymous visitors", 2.0, self._look_up_anonymously),
            Caller("petitioners", 0.7, self._petition(lambda: f"petitioner-{self._random.randrange(12)}")),
            Caller("a petition mill", 0.8, self._petition(lambda: "petition-mill")),
        ]

    async def _send_mail(self) -> None:
        number = self._random.randrange(10_000)
        await self._post(
            "mail",
            "/v1/messages",
            {
                "inbox_id": self._inbox_id,
                "to": [f"reader{number}@example.org"],
                "subject": "This week",
                "body": "What is **new** this week.",
            },
        )

    def _chat(self, writers: list[int]) -> Callable[[], Any]:
        async def chat() -> None:
            user = self._random.choice(writers)
            update_id = next(self._update_ids)
            message = {
                "message_id": update_id,
                "from": {"id": user, "is_bot": False, "first_name": WRITERS[user].title()},
                "chat": {"id": user, "type": "private"},
                "text": "What is the weather like?",
            }
            await self._post(
                "telegram",
                "/telegram/webhook",
                {"update_id": update_id, "message": message},
                {"X-Telegram-Bot-Api-Secret-Token": self._webhook_secret},
            )

        return chat

    def _look_up(self, key: str) -> Callable[[], Any]:
        return lambda: self._get("tiers", "/v1/whoami", {"X-API-Key": key})

    async def _look_up_anonymously(self) -> None:
        """Call with forwarded addresses, so that the user's own curl has another address."""
        address = f"198.51.100.{self._random.randrange(200, 208)}"
        await self._get("tiers", "/v1/whoami", {"X-Forwarded-For": address})

    def _petition(self, submitter: Callable[[], str]) -> Callable[[], Any]:
        async def petition() -> None:
            document = {
                "type": "GENERAL",
                "text": self._random.choice(_CONCERNS),
                "submitter_id": str(uuid5(NAMESPACE_DNS, f"{submitter()}.example.org")),
            }
            await self._post("petitions", "/v1/petition-submissions", document)

        return petition

    async def _post(
        self, service: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> None:
        self._tallies[service].add(await self._clients[service].post(path, json=body, headers=headers))

    async def _get(self, service: str, path: str, headers: Mapping[str, str]) -> None:
        self._tallies[service].add(await self._clients[service].get(path, headers=headers))
