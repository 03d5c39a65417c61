"""Who calls the Headgate server in the demo: people, a paying customer, a batch job, and some who want too much.

Each calls over HTTP, as a program in any language would. Some stop when they are refused, others go on.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from typing import Any

import httpx

from headgate_services.demo.traffic import Caller

PEOPLE = (
    "alice", "ben", "chloe", "dilan", "emma", "farid", "grace", "hugo", "ines", "jonas",
    "keiko", "liam", "mina", "noah", "olga", "pablo", "quinn", "rosa", "sven", "tara",
)  # fmt: skip
HOMES = [f"198.51.100.{number}" for number in range(10, 60)]
"""Addresses of people; like all addresses here, of networks that exist in documentation only."""

STUFFERS = ["203.0.113.66", "203.0.113.67", "203.0.113.99"]
SCRAPER = "192.0.2.200"

_TIDE_SECONDS = 90.0
_BATCH = 25  # decisions per request of the batch job
_BATCH_SECONDS = 8.0
_NIGHT_SECONDS = 30.0  # they come often here


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
        """Return them, with their paces: about 110 decisions a second in all."""
        return [
            *(Caller(f"people {number}", 10.0, self._person) for number in range(3)),
            Caller("acme, a pro customer", 10.0, lambda: self._ask("api", "hit", "acme", tier="pro")),
            Caller(
                "globex, with a contract", 14.0, lambda: self._ask("api", "hit", "globex", tier="enterprise")
            ),
            Caller("people who sign in", 3.0, lambda: self._ask("login", "hit", self._random.choice(HOMES))),
            Caller("a credential stuffer", 9.0, lambda: self._ask("login", "hit", next(self._stuffers))),
            Caller("people who search", 8.0, lambda: self._ask("search", "hit", self._random.choice(HOMES))),
            Caller("a greedy scraper", 20.0, lambda: self._ask("search", "hit", SCRAPER)),
            *(Caller(f"{app}, an LLM client", 1.0, self._chat(app)) for app in ("support-bot", "notebook")),
            Caller("people who export", 1.5, self._export),
            Caller("a nightly batch job", 2.0, self._nightly),
        ]

    async def _person(self) -> None:
        """Come and go with the tide, so that the chart has something to show."""
        if self._random.random() < 0.6 + 0.4 * math.sin(time.monotonic() * math.tau / _TIDE_SECONDS):
            await self._ask("api", "hit", self._random.choice(PEOPLE))

    async def _export(self) -> None:
        """Half of the people are on the pro plan; the others' plan has no exports."""
        person = self._random.randrange(len(PEOPLE))
        key = {"person": PEOPLE[person], "team": f"team-{person % 4}"}
        await self._ask("exports", "hit", key, tier="pro" if person % 2 else "free")

    def _chat(self, app: str) -> Any:
        async def chat() -> None:
            """Hold what an answer might cost, wait for the model, and pay what it did cost."""
            held = self._random.randrange(1500, 4000)
            answer = await self._ask("llm-tokens", "hold", app, held)
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
        """Ask for many at once, for a while, then rest."""
        if time.monotonic() % _NIGHT_SECONDS < _BATCH_SECONDS:
            calls = [{"limiter": "api", "operation": "hit", "key": "nightly-batch"}] * _BATCH
            await self._post("/v1/batch", {"calls": calls})

    async def _ask(
        self,
        limiter: str,
        operation: str,
        key: str | dict[str, str],
        cost: int = 1,
        tier: str | None = None,
    ) -> Any:
        body = {"key": key, "cost": cost, "tier": tier}
        return await self._post(f"/v1/limiters/{limiter}/{operation}", body)

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        response = await self._client.post(path, json=body)
        return response.raise_for_status().json()
