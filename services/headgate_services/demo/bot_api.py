"""A local replacement of Telegram's Bot API."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request


class BotApiStandIn:
    """Answers every method of the Bot API with success.

    Attributes:
        app: The ASGI application.
        refusals: The number of messages with the text of a refusal.
    """

    def __init__(self, refusal: str) -> None:
        self.app = FastAPI(openapi_url=None)
        self.app.add_api_route("/{method:path}", self._answer, methods=["POST"])
        self.refusals = 0
        self._refusal = refusal

    async def _answer(self, request: Request) -> dict[str, Any]:
        arguments = await request.json()
        self.refusals += arguments.get("text") == self._refusal
        return {"ok": True, "result": {"message_id": 1}}
