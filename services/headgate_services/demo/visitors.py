"""Who uses the four services in the demo, and what came of it.

The services refuse as their contracts say: with 429, or, for the Telegram bot, with a message to the sender.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import NAMESPACE_DNS, uuid5

import httpx

from headgate_services.demo.stand_ins import BotApiStandIn
from headgate_services.demo.traffic import Caller

WRITERS = {1001: "ada", 1002: "boris", 1003: "carla", 1004: "deniz"}
"""Who may use the bot, by their ids at Telegram."""

_TOO_MANY = 429
_CONCERNS = (
    "More benches in the park",
    "A later bus on Fridays",
    "Quieter leaf blowers",
    "A library on Sundays",
)


@dataclass(slots=True)
class VisitTally:
    """What one service has answered: all of it, and how much of that was a refusal for the limit."""

    sent: int = 0
    refused: int = 0

    def add(self, response: httpx.Response) -> None:
        """Count an answer; anything but success and a refusal is a failure.

        Raises:
            httpx.HTTPStatusError: It is.
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
        webhook_secret: What Telegram sends along.
        bot_api: What the bot answers to.
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
        """Return what a service has answered so far."""
        tally = self._tallies[service]
        if service == "telegram":  # every update is answered with 200; a refusal is a message of the bot
            tally.refused = self._bot_api.refusals
        return tally

    def callers(self) -> list[Caller]:
        """Return them, with their paces: about 20 requests a second in all."""
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
        """Come from a few addresses, through a proxy that the service trusts; so people's own curl is another address."""
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
