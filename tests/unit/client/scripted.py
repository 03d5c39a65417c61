"""A scripted server in this process, which records its requests."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from headgate import Decision
from headgate.decision import Verdict

RULE = "per-minute"

Reply = tuple[int, Any]
"""Status and JSON document."""


@dataclass(frozen=True)
class Asked:
    """A received request."""

    method: str
    path: str
    body: Any
    headers: httpx.Headers


class ScriptedServer:
    """Replaces a server for `ServerStore(url, transport=server.transport)`.

    Attributes:
        asked: All requests, in order; a batch is one request.
        reply: Returns the response; may be a coroutine function for async stores, and may raise errors of httpx.
    """

    def __init__(self, reply: Callable[[Asked], Any] | None = None) -> None:
        self.asked: list[Asked] = []
        self.reply = reply or usual_reply
        self.transport = _Transport(self)

    @property
    def paths(self) -> list[str]:
        return [asked.path for asked in self.asked]

    def received(self, request: httpx.Request) -> Any:
        body = json.loads(request.content) if request.content else None
        path = request.url.raw_path.decode("ascii")
        self.asked.append(Asked(request.method, path, body, request.headers))
        return self.reply(self.asked[-1])


class _Transport(httpx.BaseTransport, httpx.AsyncBaseTransport):
    def __init__(self, server: ScriptedServer) -> None:
        self._server = server

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return as_response(self._server.received(request))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        reply = self._server.received(request)
        return as_response(await reply if inspect.isawaitable(reply) else reply)


def as_response(reply: Any) -> httpx.Response:
    if isinstance(reply, httpx.Response):
        return reply
    status, document = reply
    return httpx.Response(status, json=document)


def usual_reply(asked: Asked) -> Reply:
    """Respond like a server with one limiter of "5/minute" that admits every call; the id of a hold contains its key."""
    if asked.path == "/v1/batch":
        return 200, {"answers": [_answered(call) for call in asked.body["calls"]]}
    if asked.path.startswith("/v1/holds/"):
        hold = asked.path.split("/")[3]
        return 200, {"hold": hold, "limiter": "x", "held": 9, "cost": 0, "first": True, "degraded": False}
    if asked.method == "GET":
        return 200, LIMITER if asked.path != "/v1/limiters" else {"limiters": [LIMITER]}
    return _operation(asked.path.rpartition("/")[2], asked.body)


def _answered(call: dict[str, Any]) -> dict[str, Any]:
    status, body = _operation(call["operation"], call)
    return {"status": status, "body": body}


def _operation(operation: str, call: dict[str, Any]) -> Reply:
    if operation in ("hit", "check"):
        return 200, decision_document(ADMITTED)
    if operation == "hold":
        return 200, {
            "decision": decision_document(ADMITTED),
            "hold": f"id-{call['key']}",
            "expires_after": 60.0,
        }
    if operation == "record":
        return 200, {"recorded": call.get("cost", 1), "degraded": False}
    return 200, {}


def decision_document(decision: Decision) -> dict[str, Any]:
    """Return a decision as the server writes it."""
    figures = ("allowed", "limit", "remaining", "retry_after", "reset_after", "rule", "denied_by", "degraded")
    return {
        **{name: getattr(decision, name) for name in figures},
        "results": [result._asdict() for result in decision.results],
    }


def problem(status: int, detail: str, **members: object) -> Reply:
    """Return an error response."""
    return status, {"type": "about:blank", "title": "?", "status": status, "detail": detail, **members}


ADMITTED = Decision.make((RULE,), [Verdict(True, 5, 4, None, 60_000_000)])

LIMITER: dict[str, Any] = {
    "name": "login",
    "rules": [
        {
            "name": RULE,
            "kind": "sliding_window",
            "quota": "5/minute",
            "limit": 5,
            "period": 60.0,
            "burst": None,
            "scope": None,
            "tiers": {"pro": "50/minute"},
            "strict": True,
            "buckets": 60,
            "words": "at most 5 in any minute for each key",
        }
    ],
    "shadow": [],
    "store": "redis://***@host/0",
    "on_store_error": "closed",
    "default_tier": None,
    "headers": "both",
}
